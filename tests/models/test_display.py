"""What is printed of requests: all of their text, the prompt apart from the answer."""

from __future__ import annotations

import io

from rich.console import Console

from fngraph.models import BYTE_TEXT, Event, Served, start
from fngraph.models.generate import plan
from fngraph.models.serving.texts.display import show, texts


def shown(*prompts: str, answer: str, text=BYTE_TEXT, stop=()) -> str:
    """What `show` prints off a terminal, 40 columns wide."""
    state, policy = plan(prompts, 3000, max_tokens=8, max_reqs=1, text=text, stop=stop)
    console = Console(file=io.StringIO(), width=40)
    events = tuple(Event(job.id, text.encode(answer), "length") for job in state.waiting)
    one = Served(start(1, policy), None, "decode", None, events, 0.1)
    assert list(show([one], state, console, decode=text.decode)) == [one]
    return console.file.getvalue()


def test_every_text_is_printed_whole_and_apart_from_its_prompt():
    prompts = [f"prompt {i}" for i in range(40)]  # more than a screen has lines
    lines = shown(*prompts, answer="x" * 3000).splitlines()
    for i, prompt in enumerate(prompts):
        assert f"{i} {prompt} => {'x' * 3000}" in lines


def test_a_growing_text_is_folded():
    state, _ = plan(["abc"], 2000, max_tokens=8, max_reqs=1)
    console = Console(file=io.StringIO(), width=80)
    console.print(texts([job.request for job in state.waiting], {0: [ord("x")] * 2000}))
    assert console.file.getvalue().count("x") == 2000


def test_a_text_ends_before_its_stop_and_a_prompt_does_not():
    """As in a chat template, where the end of each turn is the eos token."""
    text = BYTE_TEXT._replace(stops=frozenset({ord("#"), ord("!")}))
    assert "user# ask! => answer\n" in shown("user# ask!", answer="answer#", text=text)
    assert "ask => \n" in shown("ask", answer="!", text=text)
    assert "ask => an\n" in shown("ask", answer="answer", stop=["we", "sw"])
