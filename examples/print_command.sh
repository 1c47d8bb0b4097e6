#!/usr/bin/env bash
# What LAUNCH=echo means to the launchers, which source this: the command is printed as it can be pasted into a shell, torchrun in
# front, and each word quoted that the shell would change.
print_command() {
    local word line=torchrun
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:,=@%+-]+$ ]] || printf -v word %q "$word"
        line+=" $word"
    done
    printf '%s\n' "$line"
}
if [ "${LAUNCH:-}" = echo ]; then LAUNCH=print_command; fi
