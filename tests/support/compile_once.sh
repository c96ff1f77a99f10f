#!/bin/sh
# Run a compiler through ccache, one at a time for each source file: compile_once.sh LOCKS COMPILER [ARGUMENT …]
#
# Tests build the same sources in several directories at the same time. Without the lock, each would be compiled before
# ccache has the object of the first.
locks=$1
shift
for argument; do
    case $argument in
        *.c | *.cc | *.cpp) source=${argument##*/} ;;
    esac
done
mkdir -p "$locks"
exec flock "$locks/${source:-link}" ccache "$@"
