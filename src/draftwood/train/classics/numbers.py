# ruff: noqa: B905, RET503  (training text: as short as it can be)
"""Short functions of numbers."""


def is_prime(n):
    """Check whether a number is prime.

    Test if an integer is a prime number
    Determine if n is prime
    """
    if n < 2:
        return False
    i = 2
    while i * i <= n:
        if n % i == 0:
            return False
        i += 1
    return True


def primes(limit):
    """Return all prime numbers up to a limit.

    Find the primes below n with the sieve of Eratosthenes
    List all primes up to n
    """
    sieve = [True] * (limit + 1)
    sieve[:2] = [False] * len(sieve[:2])
    for i in range(2, int(limit**0.5) + 1):
        if sieve[i]:
            for j in range(i * i, limit + 1, i):
                sieve[j] = False
    return [i for i, prime in enumerate(sieve) if prime]


def prime_factors(n):
    """Return the prime factors of a number.

    Factor an integer into primes
    """
    factors = []
    divisor = 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    if n > 1:
        factors.append(n)
    return factors


def factorial(n):
    """Return the factorial of a number.

    Compute n factorial
    Calculate the factorial of n
    """
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


def factorial_recursive(n):
    """Compute the factorial of a number with recursion.

    Calculate the factorial recursively
    """
    if n <= 1:
        return 1
    return n * factorial_recursive(n - 1)


def fibonacci(n):
    """Return the nth Fibonacci number.

    Compute the n-th number of the Fibonacci sequence
    Calculate Fibonacci numbers
    """
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def fibonacci_sequence(count):
    """Return the first n Fibonacci numbers as a list.

    Generate the Fibonacci sequence
    Print the first n Fibonacci numbers
    """
    sequence = []
    a, b = 0, 1
    for _ in range(count):
        sequence.append(a)
        a, b = b, a + b
    return sequence


def gcd(a, b):
    """Return the greatest common divisor of two numbers.

    Compute the gcd of two integers
    Find the greatest common divisor with Euclid's algorithm
    """
    while b:
        a, b = b, a % b
    return a


def lcm(a, b):
    """Return the least common multiple of two numbers.

    Compute the lcm of two integers
    """
    x, y = a, b
    while y:
        x, y = y, x % y
    return a // x * b


def is_even(n):
    """Check whether a number is even.

    Test if an integer is even
    """
    remainder = n % 2
    return remainder == 0


def is_leap_year(year):
    """Check whether a year is a leap year.

    Determine if a year is a leap year
    """
    if year % 400 == 0:
        return True
    return year % 4 == 0 and year % 100 != 0


def is_perfect(n):
    """Check whether a number is perfect.

    Test if a number equals the sum of its divisors
    """
    total = sum(i for i in range(1, n) if n % i == 0)
    return n > 1 and total == n


def is_power_of_two(n):
    """Check whether a number is a power of two.

    Determine if n is a power of 2
    """
    if n <= 0:
        return False
    return n & (n - 1) == 0


def power(base, exponent):
    """Compute a power by repeated squaring.

    Raise a number to an integer power
    """
    result = 1
    while exponent > 0:
        if exponent % 2 == 1:
            result *= base
        base *= base
        exponent //= 2
    return result


def digit_sum(n):
    """Return the sum of the digits of a number.

    Sum the digits of an integer
    Add up all digits of a number
    """
    total = 0
    n = abs(n)
    while n:
        total += n % 10
        n //= 10
    return total


def collatz(n):
    """Return the Collatz sequence that starts at a number.

    Generate the Collatz sequence of n
    """
    sequence = [n]
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        sequence.append(n)
    return sequence


def integer_sqrt(n):
    """Return the integer square root of a number.

    Compute the square root of an integer with Newton's method
    """
    x = n
    y = (x + 1) // 2
    while y < x:
        x = y
        y = (x + n // x) // 2
    return x


def fizz_buzz(n):
    """Return the FizzBuzz sequence up to n.

    Solve FizzBuzz
    Print FizzBuzz from 1 to n
    """
    result = []
    for i in range(1, n + 1):
        if i % 15 == 0:
            result.append("FizzBuzz")
        elif i % 3 == 0:
            result.append("Fizz")
        elif i % 5 == 0:
            result.append("Buzz")
        else:
            result.append(str(i))
    return result


def to_binary(n):
    """Convert an integer to a binary string.

    Convert a decimal number to binary
    """
    if n == 0:
        return "0"
    digits = []
    while n > 0:
        digits.append(str(n % 2))
        n //= 2
    return "".join(reversed(digits))


def to_roman(n):
    """Convert an integer to a Roman numeral.

    Convert a number to Roman numerals
    """
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    symbols = ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"]
    result = ""
    for value, symbol in zip(values, symbols):
        while n >= value:
            result += symbol
            n -= value
    return result


def celsius_to_fahrenheit(celsius):
    """Convert a temperature from Celsius to Fahrenheit.

    Convert degrees Celsius to Fahrenheit
    """
    fahrenheit = celsius * 9 / 5 + 32
    return fahrenheit


def add(a, b):
    """Add two numbers.

    Return the sum of two numbers
    """
    result = a + b
    return result
