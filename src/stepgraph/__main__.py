"""``python -m stepgraph``: the command line."""

from stepgraph.cli.main import main

if __name__ == "__main__":
    main(prog_name="stepgraph")
