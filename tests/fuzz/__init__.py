"""The standing attack: random requests over all that can be combined, and what they leave.

Each finished request is compared with the same request alone. Longer, and with another seed:
`python -m tests.fuzz --seconds 600 --seed 7`.

- `features`: what a request may ask, a row of a table for each feature. To add one, add a row.
- `gates`, `patches`: what it may ask of conditions of steering, and of patching.
- `asks`: one drawn request.
- `oracle`: what a request must give, told from the same request alone.
- `leaks`: what an engine must have given back after a round.
- `rounds`: draws requests, runs them together, asks the oracle and looks for leaks.
"""
