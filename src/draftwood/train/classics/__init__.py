"""Short well-known functions and answers, written for this project: what people ask a small code model first.

`pairs.classic_pairs` asks for each function in every wording it knows. The first line of a docstring is the summary;
the lines of the second paragraph are other ways to ask for the same function. `chat.py` says who is speaking.
"""
