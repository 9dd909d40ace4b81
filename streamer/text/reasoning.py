"""Splits what a model thinks from what it says, while the text arrives. Pure."""

import re

from streamer.text.held import partial_suffix

OPEN, CLOSE = "<think>", "</think>"
_OPENED = re.compile(r"<think>\s*\Z")


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt ends inside a thought: some templates write the opening tag themselves."""
    return _OPENED.search(prompt[-64:]) is not None


def closes_thinking(prompt: str) -> bool:
    """Whether a prompt ends with a thought already closed: that is how templates say to answer at once."""
    return prompt[-64:].rstrip().endswith(CLOSE)


def thinks(template: str) -> bool:
    """Whether a chat template knows thoughts at all; the answers of other models are left as they are."""
    return CLOSE in template


class ReasoningSplitter:
    """`push(text) -> (reasoning, content)`; the tags and the white space around them belong to neither.

    Only a thought at the very beginning counts. `opened`: the prompt ended inside it.
    """

    def __init__(self, *, opened: bool = False) -> None:
        self._state = "thinking" if opened else "start"
        self._held = ""
        self._trimming = opened  # white space at the beginning of a part is dropped

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        reasoning: list[str] = []
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(OPEN):
                self._state, self._held, self._trimming = "thinking", begun[len(OPEN) :], True
            elif begun and not OPEN.startswith(begun):
                self._state = "saying"
            else:
                return "", ""
        if self._state == "thinking":
            reasoning.append(self._think())
        return "".join(reasoning), self._say() if self._state == "saying" else ""

    def finish(self) -> tuple[str, str]:
        """What was held back, when no more comes: in a thought that never ended, it is thought."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._state == "thinking" else ("", held)

    def _think(self) -> str:
        before, closed, after = self._held.partition(CLOSE)
        if self._trimming:
            before = before.lstrip()
        if closed:
            self._state, self._held, self._trimming = "saying", after, True
            return before.rstrip()
        keep = partial_suffix(before, CLOSE)
        body = before[: len(before) - keep]
        body = body.rstrip()  # may be what stands before the closing tag
        self._held = before[len(body) :]
        self._trimming = self._trimming and not body
        return body

    def _say(self) -> str:
        text, self._held = self._held, ""
        if self._trimming:
            text = text.lstrip()
            self._trimming = not text
        return text
