# How cLLM builds llama.cpp. CMAKE_PROJECT_llama.cpp_INCLUDE names this file, or one that includes it.

# libllama-common is half of the compilation, and only llama.cpp's own programs use it.
set(LLAMA_BUILD_COMMON OFF)

# The kernels are added to llama.cpp's CPU library without a change to its sources: each library
# ggml-cpu* gets the sources of this folder, compiled for the same CPUs. The functions of ggml that
# they replace get other names, and do what is passed on to them.
if(CMAKE_VERSION VERSION_LESS 3.19)
  message(STATUS "cLLM: kernels left out, because CMake is older than 3.19")
  return()
endif()

set(CLLM_NATIVE "${CMAKE_CURRENT_LIST_DIR}")
set(CLLM_SOURCES "${CLLM_NATIVE}/attention.cpp" "${CLLM_NATIVE}/products.cpp" "${CLLM_NATIVE}/quantized.cpp")

function(cllm_add_kernels)
  set(folder "${CMAKE_CURRENT_SOURCE_DIR}/ggml/src")
  # Other declarations belong to a llama.cpp that these kernels were not made for.
  file(SHA256 "${folder}/ggml-cpu/tiled/tiled.h" tiled)
  file(STRINGS "${folder}/ggml-cpu/ops.h" attention REGEX
    "void ggml_compute_forward_flash_attn_ext\\(const struct ggml_compute_params \\* params, struct ggml_tensor \\* dst\\);")
  file(STRINGS "${folder}/ggml-cpu/ops.h" product REGEX
    "void ggml_compute_forward_mul_mat\\(const struct ggml_compute_params \\* params, struct ggml_tensor \\* dst\\);")
  if(NOT attention OR NOT product OR NOT tiled STREQUAL "684aaa5320e20eadfc799c8ce04c52bf7c0d32b323f395de59ce469bda254a72")
    message(STATUS "cLLM: kernels left out, because this llama.cpp is not the one they were made for")
    return()
  endif()
  get_property(targets DIRECTORY "${folder}" PROPERTY BUILDSYSTEM_TARGETS)
  list(FILTER targets INCLUDE REGEX "^ggml-cpu")
  list(FILTER targets EXCLUDE REGEX "-feats$")
  foreach(target IN LISTS targets)
    target_sources(${target} PRIVATE ${CLLM_SOURCES})
    message(STATUS "cLLM: kernels added to ${target}")
  endforeach()
  list(GET targets 0 first)
  cllm_rename(${first} ops.cpp ggml_compute_forward_flash_attn_ext=ggml_original_flash_attn_ext)
  cllm_rename(${first} tiled/tiled.cpp
    ggml_compute_forward_mul_mat_tiled=ggml_original_mul_mat_tiled
    ggml_compute_forward_mul_mat_id_tiled=ggml_original_mul_mat_id_tiled)
  cllm_rename(${first} traits.cpp ggml_cpu_extra_compute_forward=ggml_original_extra_compute_forward)
  cllm_rename(${first} amx/amx.cpp ggml_is_contiguous=cllm_fits_amx)
  set(options "")
  if(NOT MSVC)
    # The same operations everywhere: the compiler must not make one of a product and a sum.
    list(APPEND options -ffp-contract=off)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # This order of instructions needs more registers than there are (pyproject.toml sets it).
    list(APPEND options -fno-schedule-insns)
  endif()
  foreach(source attention quantized)
    set_source_files_properties("${CLLM_NATIVE}/${source}.cpp" TARGET_DIRECTORY ${first} PROPERTIES
      COMPILE_OPTIONS "${options}")
  endforeach()
endfunction()

function(cllm_rename target file)
  set_source_files_properties(ggml-cpu/${file} "${CMAKE_CURRENT_SOURCE_DIR}/ggml/src/ggml-cpu/${file}"
    TARGET_DIRECTORY ${target} PROPERTIES COMPILE_DEFINITIONS "${ARGN}")
endfunction()

cmake_language(DEFER CALL cllm_add_kernels)
