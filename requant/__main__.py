"""`python -m requant`: the command line."""

from requant.cli import main

if __name__ == "__main__":
    main()
