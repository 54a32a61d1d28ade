#!/usr/bin/env bash
# Lint, types and tests, in a virtual environment that it makes and keeps under .venv.
#
#   scripts/run_tests.sh                 # the fast tests, as CI runs them
#   scripts/run_tests.sh --all           # and those marked slow
#   scripts/run_tests.sh -n 0 -k engine  # other arguments go to pytest
#   PYTHON=python3.12 scripts/run_tests.sh
#
# The environment is made again when pyproject.toml or the interpreter has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = --all ]; then
  shift
  set -- -m '' "$@"  # in place of "not slow", which pyproject.toml says
fi

python=${PYTHON:-python3}
venv=.venv
stamp=$venv/installed
wanted=$("$python" -c '
import hashlib, pathlib, sys
print(sys.version.split()[0], hashlib.sha256(pathlib.Path("pyproject.toml").read_bytes()).hexdigest())
')

if [ ! -x "$venv/bin/python" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  "$python" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install --quiet --editable '.[test,dev]'
  echo "$wanted" > "$stamp"
fi

"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
# Types are checked beside the tests: alone that uses one core.
"$venv/bin/mypy" &
types=$!
trap 'kill "$types" 2>/dev/null || true' EXIT
# Two workers: compiling is most of the time and uses one core. The last -n given wins. Each takes
# half of the files, so that what a file's tests have in common is made once, and then steals.
status=0
"$venv/bin/python" -m pytest -n 2 --dist worksteal "$@" || status=$?
wait "$types" || status=$?
exit "$status"
