# Sourced by the other scripts: makes .venv with this checkout in it, quickly the second time.
#   setup_venv <extras>      e.g. setup_venv dev
# Where there is no NVIDIA GPU, torch's CPU build is taken if a configured package index has it.
# PYTHON picks the interpreter; pip's own PIP_* variables choose indexes.

TORCH_VERSION=${TORCH_VERSION:-2.13.0}

setup_venv() {
  local extras=$1 python=${PYTHON:-python3} stamp wanted
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "swiftfp8 needs Python 3.11 or newer; $python is $("$python" -V 2>&1). Set PYTHON=..." >&2
    return 2
  }
  stamp=.venv/.swiftfp8-setup
  wanted="$extras $TORCH_VERSION $(cksum < pyproject.toml) $(cksum < scripts/setup.sh)"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    . .venv/bin/activate
    return 0
  fi
  echo "setting up .venv (torch, transformers, swiftfp8[$extras]) ..."
  [ -x .venv/bin/python ] || "$python" -m venv .venv || return 1
  . .venv/bin/activate
  python -m pip install -q --upgrade pip || return 1
  install_torch || return 1
  # The torch that is there now stays: a resolver must not swap it for another build.
  # Its version by metadata: torch itself complains while NumPy is not there yet.
  python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
    > .venv/torch.txt || return 1
  python -m pip install -q -c .venv/torch.txt -e ".${extras:+[$extras]}" || return 1
  echo "$wanted" > "$stamp"
}

install_torch() {
  python -c 'import torch' 2>/dev/null && return 0
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    python -m pip install -q 'torch>=2.7,<3'
  else
    python -m pip install -q "torch==$TORCH_VERSION+cpu" 2>/dev/null \
      || python -m pip install -q "torch==$TORCH_VERSION"
  fi
}
