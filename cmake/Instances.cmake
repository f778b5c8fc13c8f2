# The CUDA instances: which (family, pass, dtype, head dim) exist, and everything that
# is generated from that list into the build folder.
#
#   add_attention_instances(<family> <pass>
#     ARCHITECTURES <entry>...     CMake's CUDA_ARCHITECTURES: 80 is SASS and PTX, 90a-real SASS
#     DTYPES <dtype>...            bfloat16, float16, float32; float8 alone
#     HEAD_DIMS <n>...             ascending; a head dim in between uses the next larger one
#     [GENERAL_ONLY]               no plain instances: calls without modifiers take the general ones
#
# The calls in CMakeLists.txt are the one table. <family> is sm80, sm90, ...; <pass> is forward
# or backward. All passes of a family share its architectures.
#
# For each dtype and head dim, plain and general, the instance <family>_<pass>_<dtype>_<head
# dim>_<plain|general> is the explicit instantiation of
#
#   namespace jax_flash::<family> {
#   template <typename Element, int kHeadDim, bool kGeneral>
#   Status launch_<pass>(const <Forward|Backward>& params, const Choice& choice,
#                       cudaStream_t stream);
#   }
#
# of "<family>/<pass>/launch.cuh", with Element __nv_bfloat16, __half or float. kHeadDim bounds
# max(head_dim, value_dim). On Hopper, those of float8 and float32 have directories and functions of
# their own: launch_<pass>_<dtype><kHeadDim, kGeneral> of "<family>/<pass>_<dtype>/launch.cuh"; those
# of float8 take the scales, too. All instances of a head dim share one source, <family>_<pass>_<head
# dim>.cu: to read the headers takes as long as to compile a simple kernel.
#
#   add_attention_source(<name> ARCHITECTURES <entry>... SOURCE <file>)
#
# compiles kernels that do not depend on the head dim. A template of such a kernel in a header would
# be compiled again for each head dim. JAX_FLASH_INSTANCES leaves no such source out.
#
# finish_attention_instances(<target>), after the last entry, links all of them into <target>,
# with JAX_FLASH_WITH_CUDA defined, and writes "instances.h": the tables kForwardInstances,
# kForwardFloat8Instances and kBackwardInstances, and find_instance(), with which cuda/launch.cc
# (plain C++: it compiles no kernel) launches what cuda/plan/choose.cc chose. See instances.h.in.
#
# Every object is compiled through check_ptxas.py, which fails on a register spill beyond the
# kernel's budget in spills.txt, and on ptxas's reports of serialized wgmma; with JAX_FLASH_WERROR
# also on a budget that is greater than what the kernel spills. All of these are only warnings with
# an nvcc of another release than the build requirements' (a user's own toolkit).

# For builds that measure one change (`python benchmarks/run.py ablation`): JAX_FLASH_DEFINES
# is a list of NAME=VALUE for the kernels' sources, with which spills are only warnings, and
# JAX_FLASH_INSTANCES a regular expression: instances whose name it does not match are left out.
set(JAX_FLASH_DEFINES "" CACHE STRING "Definitions for the CUDA kernels, to measure what they change")
set(JAX_FLASH_INSTANCES "" CACHE STRING "A regular expression: CUDA instances to build")

set(instances_template_dir "${CMAKE_CURRENT_LIST_DIR}")
set_property(GLOBAL PROPERTY attention_families "")
set_property(GLOBAL PROPERTY attention_libraries "")
foreach(pass forward forward_float8 backward)
  set_property(GLOBAL PROPERTY attention_${pass}_rows "")
endforeach()

set(element_of_bfloat16 __nv_bfloat16)
set(element_of_float16 __half)
set(element_of_float32 float)
set(enum_of_bfloat16 kBFloat16)
set(enum_of_float16 kFloat16)
set(enum_of_float32 kFloat32)
set(enum_of_float8 kFloat8)
set(params_of_forward Forward)
set(params_of_backward Backward)
set(variant_of_false plain)
set(variant_of_true general)

# An object library whose sources are compiled through check_ptxas.py.
function(attention_library library architectures)
  set_property(GLOBAL APPEND PROPERTY attention_libraries ${library})
  add_library(${library} OBJECT)
  set_target_properties(${library} PROPERTIES CUDA_ARCHITECTURES "${architectures}")
  target_include_directories(${library} PRIVATE "${PROJECT_SOURCE_DIR}/cuda")
  target_link_libraries(${library} PRIVATE jax_flash_cuda_options)
  target_compile_definitions(${library} PRIVATE ${JAX_FLASH_DEFINES})
  set(launcher "${Python_EXECUTABLE}" "${instances_template_dir}/check_ptxas.py")
  if(JAX_FLASH_DEFINES OR NOT CMAKE_CUDA_COMPILER_VERSION MATCHES "^13\\.0\\.")
    list(APPEND launcher --warn)
  elseif(JAX_FLASH_WERROR AND NOT JAX_FLASH_INSTANCES)
    list(APPEND launcher --exact)
  endif()
  # "--" ends the launcher's own arguments: nvcc's command follows.
  set_property(TARGET ${library} PROPERTY CUDA_COMPILER_LAUNCHER ${launcher} --)
endfunction()

# The library of a family, made on first use.
function(attention_family family architectures)
  get_property(families GLOBAL PROPERTY attention_families)
  if(family IN_LIST families)
    return()
  endif()
  set_property(GLOBAL APPEND PROPERTY attention_families ${family})
  attention_library(cuda_${family} "${architectures}")
  if(family STREQUAL sm90)
    generate_wgmma()
    target_include_directories(cuda_${family} PRIVATE "${PROJECT_BINARY_DIR}/generated")
  endif()
endfunction()

function(add_attention_source name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "SOURCE" "ARCHITECTURES")
  attention_library(cuda_${name} "${arg_ARCHITECTURES}")
  target_sources(cuda_${name} PRIVATE "${arg_SOURCE}")
endfunction()

# "wgmma.h", every width up to 256 that is a multiple of 16, and 8.
function(generate_wgmma)
  set(generator "${instances_template_dir}/generate_wgmma.py")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${generator}")
  file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/generated")
  set(widths 8)
  foreach(width RANGE 16 256 16)
    list(APPEND widths ${width})
  endforeach()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${generator}" "${PROJECT_BINARY_DIR}/generated/wgmma.h" ${widths}
    COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(add_attention_instances family pass)
  cmake_parse_arguments(PARSE_ARGV 2 arg "GENERAL_ONLY" "" "ARCHITECTURES;DTYPES;HEAD_DIMS")
  set(variants false true)
  if(arg_GENERAL_ONLY)
    set(variants true)
  endif()
  string(REGEX MATCH "[0-9]+" family_number ${family})
  set(header ${family}/${pass}/launch.cuh)
  set(table ${pass})
  set(scales "")
  set(own "")  # the dtype, if it has a directory and functions of its own
  if(family STREQUAL sm90 AND arg_DTYPES MATCHES "^(float32|float8)$")
    set(own ${arg_DTYPES})
    set(header ${family}/${pass}_${own}/launch.cuh)
  endif()
  if(own STREQUAL float8)
    set(table ${pass}_float8)
    set(scales "const jax_flash::Scales&, ")
  endif()
  foreach(head_dim IN LISTS arg_HEAD_DIMS)
    set(instantiations "")
    foreach(dtype IN LISTS arg_DTYPES)
      foreach(general IN LISTS variants)
        set(instance ${family}_${pass}_${dtype}_${head_dim}_${variant_of_${general}})
        if(NOT instance MATCHES "${JAX_FLASH_INSTANCES}")
          continue()
        endif()
        set(launch "${family}::launch_${pass}<${element_of_${dtype}}, ${head_dim}, ${general}>")
        if(own)
          set(launch "${family}::launch_${pass}_${own}<${head_dim}, ${general}>")
        endif()
        string(APPEND instantiations "\ntemplate jax_flash::Status jax_flash::${launch}(\n"
          "    const jax_flash::${params_of_${pass}}&, ${scales}const jax_flash::Choice&, "
          "cudaStream_t);\n")
        string(CONCAT row "    {${family_number}, DType::${enum_of_${dtype}}, ${head_dim}, ${general}, "
          "&${launch}},\n")
        set_property(GLOBAL APPEND PROPERTY attention_${table}_rows "${row}")
      endforeach()
    endforeach()
    if(instantiations)
      attention_family(${family} "${arg_ARCHITECTURES}")
      set(name ${family}_${pass}_${head_dim})
      if(arg_DTYPES MATCHES "^(float32|float8)$")
        string(APPEND name _${arg_DTYPES})
      endif()
      set(source "${PROJECT_BINARY_DIR}/instances/${name}.cu")
      configure_file("${instances_template_dir}/instances.cu.in" "${source}" @ONLY)
      target_sources(cuda_${family} PRIVATE "${source}")
    endif()
  endforeach()
endfunction()

function(finish_attention_instances target)
  get_property(families GLOBAL PROPERTY attention_families)
  set(declarations "")
  foreach(family IN LISTS families)
    string(APPEND declarations
      "namespace jax_flash::${family} {\n"
      "template <typename Element, int kHeadDim, bool kGeneral>\n"
      "Status launch_forward(const Forward& params, const Choice& choice, cudaStream_t stream);\n"
      "template <typename Element, int kHeadDim, bool kGeneral>\n"
      "Status launch_backward(const Backward& params, const Choice& choice, cudaStream_t stream);\n"
      "template <int kHeadDim, bool kGeneral>\n"
      "Status launch_forward_float8(const Forward& params, const Scales& scales,\n"
      "                             const Choice& choice, cudaStream_t stream);\n"
      "template <int kHeadDim, bool kGeneral>\n"
      "Status launch_forward_float32(const Forward& params, const Choice& choice,\n"
      "                              cudaStream_t stream);\n"
      "template <int kHeadDim, bool kGeneral>\n"
      "Status launch_backward_float32(const Backward& params, const Choice& choice,\n"
      "                               cudaStream_t stream);\n"
      "}  // namespace jax_flash::${family}\n")
  endforeach()
  foreach(pass forward forward_float8 backward)
    get_property(rows GLOBAL PROPERTY attention_${pass}_rows)
    list(LENGTH rows ${pass}_count)
    list(JOIN rows "" ${pass}_rows)
  endforeach()
  configure_file("${instances_template_dir}/instances.h.in"
    "${PROJECT_BINARY_DIR}/instances/instances.h" @ONLY)
  get_property(libraries GLOBAL PROPERTY attention_libraries)
  target_link_libraries(${target} PRIVATE ${libraries} jax_flash_cuda_options)
  target_include_directories(${target} PRIVATE "${PROJECT_BINARY_DIR}/instances")
  target_compile_definitions(${target} PRIVATE JAX_FLASH_WITH_CUDA)
  # jax_flash_cuda_options names the static runtime; CMake would add it by a bare name as well.
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX CUDA_RUNTIME_LIBRARY None)
endfunction()
