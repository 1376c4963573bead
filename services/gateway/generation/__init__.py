"""One request between its submission and its last token: pure, frames in, deltas and commands out.

`choice.py` turns the emissions of one choice into text, `generation.py` holds all choices of a request and its usage,
`plan.py` says what was asked for. Nothing here knows HTTP, the bus or a clock.
"""
