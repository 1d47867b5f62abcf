#!/usr/bin/env bash
# Installs the Debian packages that only continuous integration needs: clang with its sanitizer and
# fuzzer runtimes for the native tests, and iproute2 for the tests with network namespaces. Without
# these packages, the tests are skipped and say why.
set -euo pipefail

packages=(clang-14 libclang-rt-14-dev iproute2)

if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "not root on Debian: leaving ${packages[*]} alone"
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done
if [[ ${#missing[@]} -eq 0 ]]; then
  exit 0
fi

export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet
apt-get install --quiet --yes --no-install-recommends "${missing[@]}"
