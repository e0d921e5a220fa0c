"""Text that grows by tokens: whole characters only, and exact cuts at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draftwood.errors import RequestError
from draftwood.text.tokenizer import Tokenizer


class Detokenizer:
    """Token ids in, text out, however the ids are split into calls.

    All output joined equals `Tokenizer.decode` of all ids (less those in `skip`): an incomplete UTF-8 sequence is held
    back until its last byte comes, and becomes U+FFFD when other bytes follow or at `finish`.
    """

    def __init__(self, tokenizer: Tokenizer, skip: Iterable[int] = ()) -> None:
        """`skip`: ids that give no text (for example `tokenizer.silent`)."""
        self._tokenizer = tokenizer
        self._skip = frozenset(skip)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Return the characters that `ids` complete. Raises RequestError for an id outside the vocabulary."""
        token_bytes = self._tokenizer.token_bytes
        return self._decoder.decode(b"".join([token_bytes(i) for i in ids if i not in self._skip]))

    def finish(self) -> str:
        """Return what was held back, as U+FFFD; the stream starts anew after it."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _Matcher:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt 1977): constant time per character."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._border = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._border[length - 1]
            length += stop[i] == stop[length]
            self._border[i] = length

    def feed(self, character: str) -> bool:
        """Take one character; return whether the stop string is complete."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._border[self.matched - 1]
        self.matched += self.stop[self.matched] == character
        return self.matched == len(self.stop)


class StopStrings:
    """Passes text through up to the first stop string, holding back what may turn out to begin one.

    First means: complete after the fewest characters; of several complete there, the longest. So the result does
    not depend on how the text is split into calls.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises RequestError for an empty stop string."""
        if any(not stop for stop in stops):
            raise RequestError("stop holds an empty string; leave it out", param="stop")
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self.stop: str | None = None
        """The stop string that was found; nothing comes out after it."""

    def push(self, text: str) -> str:
        """Take more text; return what can be shown for certain."""
        if self.stop is not None or not self._matchers:
            return "" if self.stop is not None else text
        known = self._held + text
        for i, character in enumerate(text, len(self._held) + 1):
            done = [m for m in self._matchers if m.feed(character)]
            if done:
                self.stop = max((m.stop for m in done), key=len)
                self._held = ""
                return known[: i - len(self.stop)]
        keep = max(m.matched for m in self._matchers)
        self._held = known[len(known) - keep :]
        return known[: len(known) - keep]

    def finish(self) -> str:
        """Return the text held back: no stop string came of it."""
        text, self._held = self._held, ""
        return text


@dataclass(frozen=True)
class Piece:
    """What a call added: `text` to show, `used` tokens taken of those given, and the stop string found, if any."""

    text: str
    used: int
    stop: str | None = None


class TextStream:
    """Detokenizer and StopStrings in a row: an accepted run of tokens in, the text to show out.

    When a stop string is found inside a run, `used` counts the tokens up to and including the one that completed it,
    so that ids, log-probabilities and text end together.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), skip: Iterable[int] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip)
        self._stops = StopStrings(stops)
        self._cut = bool(stops)

    def push(self, ids: Sequence[int]) -> Piece:
        """Take a run of tokens. After a stop string was found, takes nothing."""
        if self._stops.stop is not None:
            return Piece("", 0, self._stops.stop)
        if not self._cut:
            return Piece(self._detokenizer.push(ids), len(ids))
        shown: list[str] = []
        for used, id in enumerate(ids, 1):
            shown.append(self._stops.push(self._detokenizer.push((id,))))
            if self._stops.stop is not None:
                return Piece("".join(shown), used, self._stops.stop)
        return Piece("".join(shown), len(ids))

    def finish(self) -> Piece:
        """End of the tokens: return the held-back text, incomplete UTF-8 as U+FFFD."""
        if self._stops.stop is not None:
            return Piece("", 0, self._stops.stop)
        text = self._stops.push(self._detokenizer.finish()) + self._stops.finish()
        return Piece(text, 0, self._stops.stop)
