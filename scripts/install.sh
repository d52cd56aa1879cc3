#!/usr/bin/env bash
# Makes .venv and installs the project with the extras named. Usage: install.sh PYTHON EXTRAS
# torch first: a CPU build where there is no GPU, so that nothing pulls gigabytes of CUDA libraries behind it.
set -euo pipefail
python=$1 extras=$2
torch='torch>=2.11,<2.14'

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || {
  echo "Saggar needs Python 3.11 or 3.12, found $("$python" --version). Try: make PYTHON=/path/to/python3.11 ..." >&2
  exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check -q)

if [[ ",$extras," == *,worker,* ]] && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    echo "Installing torch for this machine's GPU ..."
    "${pip[@]}" install "$torch"
  else
    echo "Installing torch (CPU build) ..."
    "${pip[@]}" install --retries 1 --timeout 10 --index-url https://download.pytorch.org/whl/cpu "$torch" ||
      "${pip[@]}" install 'torch==2.13.0'
  fi
fi
echo "Installing saggar[$extras] ..."
"${pip[@]}" install -e ".[$extras]"
