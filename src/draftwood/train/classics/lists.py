# ruff: noqa: B905, RET503  (training text: as short as it can be)
"""Short functions of lists, dictionaries and matrices."""


def bubble_sort(items):
    """Sort a list with bubble sort.

    Implement bubble sort
    """
    n = len(items)
    for i in range(n):
        for j in range(n - i - 1):
            if items[j] > items[j + 1]:
                items[j], items[j + 1] = items[j + 1], items[j]
    return items


def insertion_sort(items):
    """Sort a list with insertion sort.

    Implement insertion sort
    """
    for i in range(1, len(items)):
        value = items[i]
        j = i - 1
        while j >= 0 and items[j] > value:
            items[j + 1] = items[j]
            j -= 1
        items[j + 1] = value
    return items


def selection_sort(items):
    """Sort a list with selection sort.

    Implement selection sort
    """
    for i in range(len(items)):
        smallest = i
        for j in range(i + 1, len(items)):
            if items[j] < items[smallest]:
                smallest = j
        items[i], items[smallest] = items[smallest], items[i]
    return items


def merge_sort(items):
    """Sort a list with merge sort.

    Implement merge sort
    """
    if len(items) <= 1:
        return items
    middle = len(items) // 2
    left = merge_sort(items[:middle])
    right = merge_sort(items[middle:])
    result = []
    while left and right:
        result.append(left.pop(0) if left[0] <= right[0] else right.pop(0))
    return result + left + right


def quick_sort(items):
    """Sort a list with quicksort.

    Implement quicksort
    Sort numbers with the quick sort algorithm
    """
    if len(items) <= 1:
        return items
    pivot = items[len(items) // 2]
    left = [x for x in items if x < pivot]
    middle = [x for x in items if x == pivot]
    right = [x for x in items if x > pivot]
    return quick_sort(left) + middle + quick_sort(right)


def binary_search(items, target):
    """Search a sorted list with binary search.

    Implement binary search
    Find the index of a value in a sorted list
    """
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def linear_search(items, target):
    """Search a list for a value and return its index.

    Implement linear search
    """
    for i, item in enumerate(items):
        if item == target:
            return i
    return -1


def find_max(numbers):
    """Return the largest number in a list.

    Find the maximum of a list
    """
    largest = numbers[0]
    for number in numbers:
        if number > largest:
            largest = number
    return largest


def find_min(numbers):
    """Return the smallest number in a list.

    Find the minimum of a list
    """
    smallest = numbers[0]
    for number in numbers:
        if number < smallest:
            smallest = number
    return smallest


def second_largest(numbers):
    """Return the second largest number in a list.

    Find the second largest element
    """
    unique = sorted(set(numbers))
    return unique[-2]


def mean(numbers):
    """Return the mean of a list of numbers.

    Compute the average of a list
    Calculate the mean
    """
    if not numbers:
        return 0.0
    return sum(numbers) / len(numbers)


def median(numbers):
    """Return the median of a list of numbers.

    Compute the median of a list
    """
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def standard_deviation(numbers):
    """Compute the standard deviation of a list of numbers."""
    average = sum(numbers) / len(numbers)
    variance = sum((x - average) ** 2 for x in numbers) / len(numbers)
    return variance**0.5


def sum_list(numbers):
    """Return the sum of a list of numbers.

    Sum all numbers in a list
    """
    total = 0
    for number in numbers:
        total += number
    return total


def remove_duplicates(items):
    """Remove duplicates from a list and keep the order.

    Return the unique elements of a list
    """
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result


def flatten(items):
    """Flatten a nested list.

    Flatten a list of lists
    """
    result = []
    for item in items:
        if isinstance(item, list):
            result.extend(flatten(item))
        else:
            result.append(item)
    return result


def chunks(items, size):
    """Split a list into chunks of a given size.

    Split a list into parts of n elements
    """
    result = []
    for start in range(0, len(items), size):
        result.append(items[start : start + size])
    return result


def rotate(items, count):
    """Rotate a list to the left by a number of places."""
    if not items:
        return items
    count %= len(items)
    return items[count:] + items[:count]


def two_sum(numbers, target):
    """Return the indices of two numbers that add up to a target.

    Solve the two sum problem
    """
    seen = {}
    for i, number in enumerate(numbers):
        if target - number in seen:
            return [seen[target - number], i]
        seen[number] = i
    return None


def max_subarray(numbers):
    """Return the largest sum of a contiguous subarray.

    Find the maximum subarray with Kadane's algorithm
    """
    best = current = numbers[0]
    for number in numbers[1:]:
        current = max(number, current + number)
        best = max(best, current)
    return best


def most_common(items):
    """Return the most common element of a list.

    Find the most frequent item
    """
    counts = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return max(counts, key=counts.get)


def common_elements(first, second):
    """Return the elements that two lists have in common.

    Find the intersection of two lists
    """
    other = set(second)
    return [item for item in first if item in other]


def merge_sorted(first, second):
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i] <= second[j]:
            result.append(first[i])
            i += 1
        else:
            result.append(second[j])
            j += 1
    return result + first[i:] + second[j:]


def group_by(items, key):
    """Group the items of a list by a key function."""
    groups = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def invert(mapping):
    """Invert a dictionary, so that its values become keys.

    Swap the keys and values of a dictionary
    """
    result = {}
    for key, value in mapping.items():
        result[value] = key
    return result


def merge_dicts(first, second):
    """Merge two dictionaries into one."""
    result = dict(first)
    result.update(second)
    return result


def sort_by_value(mapping):
    """Sort a dictionary by its values."""
    pairs = sorted(mapping.items(), key=lambda item: item[1])
    return dict(pairs)


def transpose(matrix):
    """Transpose a matrix.

    Swap the rows and columns of a matrix
    """
    rows, columns = len(matrix), len(matrix[0])
    return [[matrix[i][j] for i in range(rows)] for j in range(columns)]


def matrix_multiply(a, b):
    """Multiply two matrices.

    Compute the product of two matrices
    """
    result = []
    for row in a:
        result.append([sum(x * y for x, y in zip(row, column)) for column in zip(*b)])
    return result


def dot_product(a, b):
    """Compute the dot product of two vectors."""
    total = 0
    for x, y in zip(a, b):
        total += x * y
    return total


def permutations(items):
    """Return all permutations of a list.

    Generate all orders of a list
    """
    if len(items) <= 1:
        return [items]
    result = []
    for i in range(len(items)):
        for rest in permutations(items[:i] + items[i + 1 :]):
            result.append([items[i]] + rest)
    return result


def subsets(items):
    """Return all subsets of a list.

    Generate the power set
    """
    result = [[]]
    for item in items:
        result += [subset + [item] for subset in result]
    return result


def breadth_first_search(graph, start):
    """Visit all nodes of a graph in breadth-first order.

    Implement breadth-first search
    Traverse a graph with BFS
    """
    visited = [start]
    queue = [start]
    while queue:
        node = queue.pop(0)
        for neighbor in graph[node]:
            if neighbor not in visited:
                visited.append(neighbor)
                queue.append(neighbor)
    return visited


def depth_first_search(graph, start, visited=None):
    """Visit all nodes of a graph in depth-first order.

    Implement depth-first search
    Traverse a graph with DFS
    """
    if visited is None:
        visited = []
    visited.append(start)
    for neighbor in graph[start]:
        if neighbor not in visited:
            depth_first_search(graph, neighbor, visited)
    return visited


def hanoi(n, source, target, spare):
    """Solve the Tower of Hanoi and return the moves."""
    if n == 0:
        return []
    moves = hanoi(n - 1, source, spare, target)
    moves.append((source, target))
    return moves + hanoi(n - 1, spare, target, source)


def coin_change(coins, amount):
    """Return the fewest coins that make up an amount.

    Solve the coin change problem
    """
    best = [0] + [amount + 1] * amount
    for value in range(1, amount + 1):
        for coin in coins:
            if coin <= value:
                best[value] = min(best[value], best[value - coin] + 1)
    return best[amount] if best[amount] <= amount else -1


class Stack:
    """A stack with push and pop."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def is_empty(self):
        return not self.items


class Queue:
    """A queue with enqueue and dequeue."""

    def __init__(self):
        self.items = []

    def enqueue(self, item):
        self.items.append(item)

    def dequeue(self):
        return self.items.pop(0)

    def is_empty(self):
        return not self.items


class Node:
    """A node of a linked list."""

    def __init__(self, value, next=None):
        self.value = value
        self.next = next


class LinkedList:
    """A singly linked list with append and iteration."""

    def __init__(self):
        self.head = None

    def append(self, value):
        node = Node(value)
        if self.head is None:
            self.head = node
            return
        current = self.head
        while current.next is not None:
            current = current.next
        current.next = node

    def __iter__(self):
        current = self.head
        while current is not None:
            yield current.value
            current = current.next


class BankAccount:
    """A bank account with deposit and withdraw."""

    def __init__(self, balance=0):
        self.balance = balance

    def deposit(self, amount):
        self.balance += amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("insufficient funds")
        self.balance -= amount


class Point:
    """A point in the plane with a distance."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def distance(self, other):
        return ((self.x - other.x) ** 2 + (self.y - other.y) ** 2) ** 0.5
