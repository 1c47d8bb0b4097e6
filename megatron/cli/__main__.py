"""The command `megatron`, started as a module."""

from megatron.cli.verbs import main

if __name__ == "__main__":
    main()
