#!/bin/sh
# Renames of the field's words, a commit a family, in the checkout that this is run in: sh apply_all.sh [FAMILY ...]
# WORDS_LENIENT=1: what a script expects may be missing.
set -e
[ -z "$(git status --porcelain --untracked-files=no)" ] || { echo "the checkout is not clean" >&2; exit 1; }
exec "${PYTHON:-.venv/bin/python}" "$(dirname "$0")/rename.py" "$@"
