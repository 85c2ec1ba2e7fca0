# The PyPI torch wheel as an imported target. find_package(Torch) is not used: it demands a CUDA toolkit,
# force-enables the CUDA language and fails on C++20 with CMake 3.25.
set(KILN_SITE "${CMAKE_SOURCE_DIR}/.deps/site" CACHE PATH "folder that holds the unpacked torch wheel")
set(TORCH_DIR "${KILN_SITE}/torch")
if(NOT EXISTS "${TORCH_DIR}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "LibTorch is missing at ${TORCH_DIR}: run scripts/setup first")
endif()
file(STRINGS "${TORCH_DIR}/version.py" torch_version REGEX "^__version__")
if(NOT torch_version MATCHES "'2\\.11\\.0")
  message(FATAL_ERROR "Kiln is built against torch 2.11.0, found ${torch_version} in ${TORCH_DIR}: run scripts/setup")
endif()

# fmt as bundled with torch (Debian's fmt clashes with it), its library part in core/instantiations.cpp. Needs no
# torch library.
add_library(kiln_fmt INTERFACE)
target_include_directories(kiln_fmt SYSTEM INTERFACE "${TORCH_DIR}/include")

add_library(kiln_torch INTERFACE)
target_include_directories(kiln_torch SYSTEM INTERFACE
  "${TORCH_DIR}/include" "${TORCH_DIR}/include/torch/csrc/api/include")
# Operators are included one by one (core/aten.h).
target_compile_definitions(kiln_torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO AT_PER_OPERATOR_HEADERS)
# --no-as-needed and the library are ONE string: written apart, the library silently drops out.
target_link_libraries(kiln_torch INTERFACE
  "-Wl,--no-as-needed,${TORCH_DIR}/lib/libtorch_cpu.so -Wl,--as-needed" "${TORCH_DIR}/lib/libc10.so")
# at::parallel_for is a header template: without -fopenmp it silently runs on one thread. libgomp is torch's own.
target_compile_options(kiln_torch INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
target_link_libraries(kiln_torch INTERFACE "${TORCH_DIR}/lib/libgomp.so.1")
target_link_options(kiln_torch INTERFACE
  "-Wl,-rpath,${TORCH_DIR}/lib" "-Wl,-rpath-link,${KILN_SITE}/nvidia/cu13/lib")

# CUDA: headers and libraries come from the nvidia wheels, kernels from their nvcc or a toolkit's.
find_program(KILN_NVCC nvcc HINTS "${KILN_SITE}/nvidia/cu13/bin" "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin /opt/cuda/bin)
set(KILN_CAN_CUDA ON)
if(KILN_NVCC)
  execute_process(COMMAND ${KILN_NVCC} --version OUTPUT_VARIABLE nvcc_version ERROR_QUIET)
endif()
if(NOT EXISTS "${KILN_SITE}/nvidia/cu13/include/cublas_v2.h" OR NOT EXISTS "${KILN_SITE}/nvidia/cudnn/lib")
  set(KILN_CAN_CUDA OFF)
  set(why "KILN_CUDA needs the CUDA libraries in ${KILN_SITE}/nvidia: run scripts/setup --cuda")
elseif(NOT KILN_NVCC)
  # The plan counts the memory of Kiln's own kernels: a GPU without them would need more than it says.
  set(KILN_CAN_CUDA OFF)
  set(why "KILN_CUDA needs nvcc of CUDA 13, found none: run scripts/setup --cuda, or set CUDA_HOME")
elseif(NOT nvcc_version MATCHES "release 13\\.")
  set(KILN_CAN_CUDA OFF)
  string(REGEX MATCH "release [0-9.]+" found "${nvcc_version}")
  set(why "KILN_CUDA needs nvcc of CUDA 13, found ${KILN_NVCC} (${found}): run scripts/setup --cuda, or set -DKILN_NVCC=PATH")
endif()
if(KILN_CUDA AND NOT KILN_CAN_CUDA)
  message(FATAL_ERROR "${why}")
endif()
# For what includes CUDA's, cuDNN's and NCCL's headers. The wheels lack crt/, which comes with the compiler.
get_filename_component(nvcc_folder "${KILN_NVCC}" DIRECTORY)
set(KILN_CUDA_INCLUDES "${KILN_SITE}/nvidia/nccl/include" "${KILN_SITE}/nvidia/cudnn/include" "${KILN_SITE}/nvidia/cu13/include" "${nvcc_folder}/../include")

# What only programs for a GPU link.
add_library(kiln_torch_cuda INTERFACE)
target_link_libraries(kiln_torch_cuda INTERFACE kiln_torch
  # ATen reaches its CUDA side through registration: nothing refers to these libraries, so they must be kept.
  "-Wl,--no-as-needed,${TORCH_DIR}/lib/libtorch_cuda.so,${TORCH_DIR}/lib/libc10_cuda.so -Wl,--as-needed"
  "${KILN_SITE}/nvidia/cu13/lib/libcudart.so.13" "${KILN_SITE}/nvidia/cu13/lib/libcublasLt.so.13" "${KILN_SITE}/nvidia/cudnn/lib/libcudnn.so.9")
foreach(part cudnn nccl nvshmem cusparselt)
  target_link_options(kiln_torch_cuda INTERFACE "-Wl,-rpath-link,${KILN_SITE}/nvidia/${part}/lib")
endforeach()
# An RPATH, not a RUNPATH: libnvrtc opens its builtins by name, and only an RPATH of the program serves what libraries open.
target_link_options(kiln_torch_cuda INTERFACE "-Wl,--disable-new-dtags,-rpath,${KILN_SITE}/nvidia/cu13/lib,-rpath,${KILN_SITE}/nvidia/cudnn/lib")
