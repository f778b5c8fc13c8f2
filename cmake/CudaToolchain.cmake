# Finds a CUDA compiler and enables the language. Sets jax_flash_has_cuda; where that is ON,
# jax_flash_cuda_options is an interface library of flags, headers and the static runtime.
#
# The first of: CUDACXX or CMAKE_CUDA_COMPILER; nvcc on the PATH or in /usr/local/cuda; the nvcc
# among the build requirements in pyproject.toml. The last needs no toolkit on the machine, so
# every ordinary build has the kernels. JAX_FLASH_CUDA=OFF leaves them out; ON makes a missing
# compiler an error.

set(JAX_FLASH_CUDA AUTO CACHE STRING "Build the CUDA kernels: ON, OFF or AUTO")
set_property(CACHE JAX_FLASH_CUDA PROPERTY STRINGS AUTO ON OFF)
set(jax_flash_has_cuda OFF)

# Why the CUDA kernels are left out, or an error where they were asked for.
macro(jax_flash_no_cuda reason)
  if(JAX_FLASH_CUDA STREQUAL "AUTO")
    message(WARNING "jax_flash: building the CPU kernel ONLY, without CUDA kernels: ${reason}")
  else()
    message(FATAL_ERROR "jax_flash: JAX_FLASH_CUDA=${JAX_FLASH_CUDA}, but ${reason}")
  endif()
endmacro()

# The first release whose nvcc takes C++20 and every flag used here.
set(oldest_nvcc 12.8)

if(NOT JAX_FLASH_CUDA)
  message(STATUS "jax_flash: JAX_FLASH_CUDA=OFF: building the CPU kernel only")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(jax_flash_system_nvcc nvcc PATHS /usr/local/cuda/bin)
  if(jax_flash_system_nvcc)
    execute_process(COMMAND "${jax_flash_system_nvcc}" --version OUTPUT_VARIABLE nvcc_version)
    if(nvcc_version MATCHES "release ([0-9.]+)" AND CMAKE_MATCH_1 VERSION_GREATER_EQUAL oldest_nvcc)
      set(ENV{CUDACXX} "${jax_flash_system_nvcc}")
    else()
      message(STATUS "jax_flash: ${jax_flash_system_nvcc} is not CUDA ${oldest_nvcc} or newer: ignored")
    endif()
  endif()
  if(NOT DEFINED ENV{CUDACXX})
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "if True:
        import importlib.util, pathlib
        spec = importlib.util.find_spec('nvidia')
        for path in spec.submodule_search_locations if spec else []:
            for nvcc in sorted(pathlib.Path(path).glob('cu1*/bin/nvcc')):
                print(nvcc.parent.parent)"
      OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE pypi_cuda)
    if(pypi_cuda)
      string(REGEX REPLACE "\n.*" "" pypi_cuda "${pypi_cuda}")
      set(ENV{CUDACXX} "${pypi_cuda}/bin/nvcc")
      # Libraries are in lib there, while its nvcc.profile looks in lib64: the linker needs help
      # to pass CMake's check of the compiler.
      set(ENV{LIBRARY_PATH} "${pypi_cuda}/lib:$ENV{LIBRARY_PATH}")
    endif()
  endif()
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  jax_flash_no_cuda("no nvcc was found (CUDACXX names one)")
  return()
endif()
# CMake guesses architectures only to be overruled by each family's.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80)
endif()
include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)  # a failure of an earlier run is no reason not to look again
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  jax_flash_no_cuda("$ENV{CUDACXX} cannot compile here")
  return()
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
# The level is that of the host's code, which only plans and launches: at -O3 it takes up to a
# fifth of a file's time. Kernels are compiled at -O3 whatever is said here.
string(REPLACE "-O3" "-O1" CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")
message(STATUS "jax_flash: building the CUDA kernels with ${CMAKE_CUDA_COMPILER} "
  "${CMAKE_CUDA_COMPILER_VERSION}")

# The runtime is linked statically and loads the driver on first use: the library then imports
# on a machine with neither.
find_library(jax_flash_cudart cudart_static REQUIRED
  HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} "${CMAKE_CUDA_COMPILER_TOOLKIT_ROOT}"
  PATH_SUFFIXES lib lib64 NO_CACHE)
find_package(Threads REQUIRED)
add_library(jax_flash_cuda_options INTERFACE)
target_include_directories(jax_flash_cuda_options SYSTEM INTERFACE
  ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
# Without line numbers, which triple the library (CONTRIBUTING.md); compression halves the rest.
target_compile_options(jax_flash_cuda_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--compress-mode=size;-Xptxas=-v>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>"
  "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${JAX_FLASH_WERROR}>>:--Werror=all-warnings>")
target_link_libraries(jax_flash_cuda_options INTERFACE
  "${jax_flash_cudart}" Threads::Threads ${CMAKE_DL_LIBS} rt)
set(jax_flash_has_cuda ON)
