#!/usr/bin/env bash
# Runs tests with an aarch64 wheel on a machine of another kind, under QEMU's emulation:
#
#     scripts/emulated.sh dist/hvd_compress-*aarch64.whl tests/golden tests/kernels
#
# Needs root on Debian, and its packages qemu-user-static, binfmt-support and mmdebstrap. Debian's
# packages for ARM are only unpacked: nothing of them runs but Python. Packages for Python are wheels
# from PyPI; PyTorch 2.10 is the last whose wheel for ARM is built for CPUs. The outcomes are counted
# in a record, build/emulated-aarch64.json.
set -euo pipefail
cd "$(dirname "$0")/.."

wheel=$1
shift
root=$PWD/build/emulated-aarch64
site=$root/opt/site
torch=2.10.0
packages=(numpy pytest hypothesis filelock typing-extensions sympy networkx jinja2 fsspec)

if [[ ! -e $site/torch ]]; then
  rm -rf "$root"
  mmdebstrap --variant=extract --arch=arm64 --include=python3,libgomp1,libstdc++6 bookworm "$root"
  pip=(python3 -m pip install --quiet --no-compile --target "$site" --python-version 3.11
    --only-binary=:all: --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64
    --platform manylinux_2_17_aarch64)
  PIP_CONSTRAINT=constraints.txt "${pip[@]}" "${packages[@]}"
  # Its dependencies would be chosen for this machine.
  PIP_CONSTRAINT=/dev/null "${pip[@]}" --no-deps "torch==$torch"
fi

# The tests import the wheel, not the checkout.
rm -rf "$root/opt/checkout" "$site"/hvd_compress*
mkdir -p "$root/opt/checkout" "$root/proc"
python3 -m zipfile -e "$wheel" "$site"
cp -r tests benchmarks setup.cfg "$root/opt/checkout"

export root
unshare --mount --fork bash -euo pipefail -s -- "$@" <<'INSIDE'
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
python() {
  env -i PATH=/usr/sbin:/usr/bin HOME=/tmp TMPDIR=/tmp PYTHONPATH=/opt/site:/opt/checkout chroot "$root" \
    python3 "$@" </dev/null
}
status=0
run='import os, pytest, sys; os.chdir("/opt/checkout"); sys.exit(pytest.main(sys.argv[1:]))'
python -c "$run" --junit-xml=/opt/emulated.xml "$@" || status=$?
python -m benchmarks.support /opt/emulated.xml --json /opt/emulated.json
exit "$status"
INSIDE
# There is no Git inside.
sed "s/\"commit\": \"unknown\"/\"commit\": \"$(git describe --always --dirty --abbrev=12)\"/" \
  "$root/opt/emulated.json" >build/emulated-aarch64.json
echo "the record is build/emulated-aarch64.json"
