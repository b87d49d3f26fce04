"""`python serving.py serve MODEL ...`: the `tllm` command."""

from tllm.cli import app

if __name__ == "__main__":
    app()
