"""Short functions of strings."""


def reverse_string(text):
    """Reverse a string.

    Return a string in reverse order
    Reverse a text
    """
    result = ""
    for char in text:
        result = char + result
    return result


def is_palindrome(text):
    """Check whether a string is a palindrome.

    Test if a text reads the same backwards
    Determine if a word is a palindrome
    """
    cleaned = [char.lower() for char in text if char.isalnum()]
    return cleaned == cleaned[::-1]


def is_anagram(first, second):
    """Check whether two strings are anagrams.

    Test if two words are anagrams of each other
    """
    first = first.replace(" ", "").lower()
    second = second.replace(" ", "").lower()
    return sorted(first) == sorted(second)


def count_vowels(text):
    """Count the vowels in a string.

    Return the number of vowels in a text
    """
    count = 0
    for char in text.lower():
        if char in "aeiou":
            count += 1
    return count


def count_words(text):
    """Count how often each word occurs in a text.

    Count word frequencies in a string
    Return the frequency of each word
    """
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def count_characters(text):
    """Count how often each character occurs in a string.

    Count the characters of a text
    """
    counts = {}
    for char in text:
        counts[char] = counts.get(char, 0) + 1
    return counts


def longest_word(text):
    """Return the longest word in a text.

    Find the longest word of a sentence
    """
    longest = ""
    for word in text.split():
        if len(word) > len(longest):
            longest = word
    return longest


def capitalize_words(text):
    """Capitalize the first letter of each word.

    Convert a string to title case
    """
    words = text.split()
    return " ".join(word[:1].upper() + word[1:] for word in words)


def caesar_cipher(text, shift):
    """Encrypt a text with the Caesar cipher.

    Shift each letter of a string by n places
    """
    result = []
    for char in text:
        if char.isalpha():
            start = ord("A") if char.isupper() else ord("a")
            result.append(chr((ord(char) - start + shift) % 26 + start))
        else:
            result.append(char)
    return "".join(result)


def remove_vowels(text):
    """Remove all vowels from a string."""
    kept = [char for char in text if char.lower() not in "aeiou"]
    return "".join(kept)


def snake_case(name):
    """Convert a name from camel case to snake case."""
    result = []
    for i, char in enumerate(name):
        if char.isupper() and i > 0:
            result.append("_")
        result.append(char.lower())
    return "".join(result)


def run_length_encode(text):
    """Compress a string with run-length encoding.

    Encode a string with run lengths
    """
    result = []
    for char in text:
        if result and result[-1][0] == char:
            result[-1][1] += 1
        else:
            result.append([char, 1])
    return "".join(char + str(count) for char, count in result)


def is_balanced(text):
    """Check whether the brackets in a string are balanced.

    Test if parentheses are balanced
    """
    pairs = {")": "(", "]": "[", "}": "{"}
    stack = []
    for char in text:
        if char in pairs.values():
            stack.append(char)
        elif char in pairs and (not stack or stack.pop() != pairs[char]):
            return False
    return not stack


def edit_distance(first, second):
    """Compute the edit distance between two strings.

    Calculate the Levenshtein distance of two words
    """
    previous = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        current = [i]
        for j, b in enumerate(second, 1):
            cost = 0 if a == b else 1
            current.append(min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + cost))
        previous = current
    return previous[-1]
