"""`python -m archipel` is the command, as torchrun and interpreters without a console script start it."""

from archipel.cli.main import main

if __name__ == "__main__":
    main()
