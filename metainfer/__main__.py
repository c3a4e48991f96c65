"""`python -m metainfer` is the command `metainfer`."""

from metainfer.cli.main import entry

if __name__ == "__main__":
    entry()
