# libhvdc_cuda.so: the CUDA kernels. It holds the CUDA runtime, and so needs nothing but a driver.

include(CheckLanguage)
# Without its own list CMake would compile a test for an architecture that may be gone.
set(CMAKE_CUDA_ARCHITECTURES OFF)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(HVDC_CUDA STREQUAL "AUTO")
    message(STATUS "no nvcc: libhvdc_cuda.so is not built")
    return()
  endif()
  message(FATAL_ERROR "HVDC_CUDA=ON needs nvcc of CUDA 12 or 13: put it on the PATH or set CUDACXX")
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12)
  if(HVDC_CUDA STREQUAL "AUTO")
    message(STATUS "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12: libhvdc_cuda.so is not built")
    return()
  endif()
  message(FATAL_ERROR "HVDC_CUDA: expected CUDA 12 or newer, got ${CMAKE_CUDA_COMPILER_VERSION}")
endif()

set(BLACKWELL)
if(HVDC_CUDA_ARCHITECTURES)
  set(CODES ${HVDC_CUDA_ARCHITECTURES})
else()
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code
    OUTPUT_VARIABLE LISTED RESULT_VARIABLE FAILED)
  if(FAILED)
    message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} --list-gpu-code failed: ${FAILED}")
  endif()
  string(REGEX MATCHALL "[0-9]+" LISTED "${LISTED}")
  set(CODES)
  foreach(CODE IN LISTS LISTED)
    if(CODE GREATER_EQUAL 75 AND CODE LESS_EQUAL 90)
      list(APPEND CODES ${CODE})
    elseif(CODE EQUAL 100 OR CODE EQUAL 120)
      list(APPEND BLACKWELL ${CODE})
    endif()
  endforeach()
endif()
list(SORT CODES COMPARE NATURAL)
list(REMOVE_DUPLICATES CODES)
set(GENCODE)
foreach(CODE IN LISTS CODES BLACKWELL)
  list(APPEND GENCODE "SHELL:-gencode arch=compute_${CODE},code=sm_${CODE}")
endforeach()
# For everything newer, also between and after Blackwell's two: drivers compile it when it is first loaded.
list(GET CODES -1 NEWEST)
list(APPEND GENCODE "SHELL:-gencode arch=compute_${NEWEST},code=compute_${NEWEST}")
message(STATUS "libhvdc_cuda.so: CUDA ${CMAKE_CUDA_COMPILER_VERSION}, for ${CODES} ${BLACKWELL} and newer")

file(GLOB CUDA_SOURCES CONFIGURE_DEPENDS "${CSRC}/cuda/*.cu")
add_library(hvdc_cuda SHARED ${CUDA_SOURCES})
target_include_directories(hvdc_cuda PRIVATE "${CSRC}" "${CSRC}/include")
target_compile_options(hvdc_cuda PRIVATE
  ${GENCODE}
  # Architectures are compiled side by side, as far as there are cores.
  --threads=0
# As for the CPU: every operation is rounded by itself, and nothing is flushed to zero.
  -fmad=false -ftz=false -prec-div=true -prec-sqrt=true
  "SHELL:-Xcompiler -ffp-contract=off,-fno-math-errno,-Wall,-Wextra")
if(HVDC_WERROR)
  target_compile_options(hvdc_cuda PRIVATE "SHELL:-Werror all-warnings" "SHELL:-Xcompiler -Werror")
endif()
set_target_properties(hvdc_cuda PROPERTIES
  CUDA_STANDARD 17
  CUDA_STANDARD_REQUIRED ON
  CUDA_EXTENSIONS OFF
  CUDA_RUNTIME_LIBRARY Static
  CUDA_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON)
target_link_options(hvdc_cuda PRIVATE ${STATIC_RUNTIME} -Wl,--exclude-libs,ALL)
install(TARGETS hvdc_cuda LIBRARY DESTINATION lib)
