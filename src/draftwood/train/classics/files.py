# ruff: noqa: B905, RET503  (training text: as short as it can be)
"""Short functions of files, time and the standard library."""

import csv
import json
import os
import random
import time


def read_file(path):
    """Read a text file and return its content.

    Read a file into a string
    """
    with open(path, encoding="utf-8") as file:
        content = file.read()
    return content


def read_lines(path):
    """Read a file and return its lines as a list.

    Read a file line by line
    """
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def write_file(path, text):
    """Write a text to a file.

    Save a string to a file
    """
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def count_lines(path):
    """Count the lines of a file.

    Return the number of lines in a file
    """
    with open(path, encoding="utf-8") as file:
        return sum(1 for line in file)


def read_json(path):
    """Read a JSON file.

    Load JSON from a file
    Parse a JSON file
    """
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def write_json(path, data):
    """Write data to a JSON file.

    Save a dictionary as JSON
    """
    with open(path, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=2)


def read_csv(path):
    """Read a CSV file and return its rows as dictionaries.

    Read a CSV file
    """
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def list_files(folder, suffix=""):
    """List all files in a folder and its subfolders.

    Find all files with a suffix
    """
    result = []
    for root, _, names in os.walk(folder):
        for name in names:
            if name.endswith(suffix):
                result.append(os.path.join(root, name))
    return result


def file_size(path):
    """Return the size of a file in kilobytes."""
    size = os.path.getsize(path)
    return size / 1024


def roll_dice(count):
    """Roll a number of dice and return their values.

    Simulate rolling dice
    """
    return [random.randint(1, 6) for _ in range(count)]


def random_password(length):
    """Generate a random password.

    Create a random string of letters and digits
    """
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    return "".join(random.choice(letters) for _ in range(length))


def shuffle(items):
    """Shuffle a list in place.

    Put the items of a list in random order
    """
    for i in range(len(items) - 1, 0, -1):
        j = random.randint(0, i)
        items[i], items[j] = items[j], items[i]
    return items


def timed(function):
    """Print how long each call of a function takes.

    Write a decorator that measures time
    Measure the run time of a function
    """

    def wrapper(*args, **kwargs):
        start = time.time()
        result = function(*args, **kwargs)
        print(f"{function.__name__} took {time.time() - start:.3f} s")
        return result

    return wrapper


def memoize(function):
    """Cache the results of a function.

    Write a decorator that caches results
    """
    cache = {}

    def wrapper(*args):
        if args not in cache:
            cache[args] = function(*args)
        return cache[args]

    return wrapper


def retry(function, attempts=3):
    """Call a function again when it raises an exception.

    Retry a function on failure
    """
    for attempt in range(attempts):
        try:
            return function()
        except Exception:
            if attempt == attempts - 1:
                raise
