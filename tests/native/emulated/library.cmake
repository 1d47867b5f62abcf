# libhvdc_cuda_emulated.so: the same sources as libhvdc_cuda.so, compiled for the host against the
# headers in this folder.

set(EMULATED "${NATIVE_TESTS}/emulated")
file(GLOB CUDA_SOURCES CONFIGURE_DEPENDS "${CSRC}/cuda/*.cu")
set_source_files_properties(${CUDA_SOURCES} PROPERTIES LANGUAGE CXX)
add_library(hvdc_emulated_objects OBJECT ${CUDA_SOURCES} "${EMULATED}/emulated.cc")
target_include_directories(hvdc_emulated_objects BEFORE PRIVATE "${EMULATED}")
target_link_libraries(hvdc_emulated_objects PUBLIC hvdc_options)
target_compile_options(hvdc_emulated_objects PRIVATE "SHELL:-x c++" -Wno-unknown-pragmas
  # Threads past a tensor's end carry a coder that has no group, and do not use it.
  -Wno-maybe-uninitialized)
set_target_properties(hvdc_emulated_objects PROPERTIES
  CXX_VISIBILITY_PRESET hidden
  POSITION_INDEPENDENT_CODE ON)

add_library(hvdc_cuda_emulated SHARED)
target_link_libraries(hvdc_cuda_emulated PRIVATE hvdc_emulated_objects)
if(HVDC_NATIVE_TESTS)
  add_executable(cuda_main "${NATIVE_TESTS}/cuda_main.cc")
  target_link_libraries(cuda_main PRIVATE hvdc_emulated_objects hvdc_objects)
endif()
