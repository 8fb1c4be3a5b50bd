"""``python -m fedem`` is the command line."""

from fedem.cli import main

if __name__ == "__main__":
    main()
