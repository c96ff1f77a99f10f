# The CMake package of dicompiler: find_package(dicompiler CONFIG) gives the function dicompiler_compile.
#
#   dicompiler_COMMAND   what is run: by default the program `dicompiler` beside this package's Python, else on PATH;
#                        a list where it takes several words: -Ddicompiler_COMMAND="python3;-m;dicompiler.cli"
cmake_minimum_required(VERSION 3.21...3.25) # depfiles for Makefiles

if(NOT dicompiler_COMMAND)
  # …/lib/python3.11/site-packages/dicompiler/cmake
  find_program(dicompiler_COMMAND dicompiler HINTS "${CMAKE_CURRENT_LIST_DIR}/../../../../../bin"
    DOC "What compiles models: a program, or a list of words")
endif()
if(NOT dicompiler_COMMAND)
  set(dicompiler_FOUND FALSE)
  set(dicompiler_NOT_FOUND_MESSAGE
    "there is no program 'dicompiler': activate its Python environment, or say what to run (-Ddicompiler_COMMAND=…)")
  return()
endif()

# Compiles a model into programs for the devices of a platform, whenever something that they depend on has changed.
#
#   dicompiler_compile(NAME n MODEL m PLATFORM p
#     [TARGET t] [STRATEGY s | PLAN f] [OBJECTIVE o] [COST c] [SHAPE input=1x3x224x224 …]
#     [OUTPUT dir] [DEPENDS file-or-target …])
#
# Adds the target n, part of `all`, which fills the directory dir (n in the binary directory unless it is given; relative
# to that). Its main file, dir/artifact.json, is new whenever anything in dir is: let other commands depend on it. The
# target's property DICOMPILER_OUTPUT is dir.
#
# MODEL, PLAN and a PLATFORM that is a file are relative to the source directory, or to the binary directory where the
# build makes them; files that TARGET, STRATEGY and COST name in braces are given in full. DEPENDS: what else the
# artifact depends on; all that dicompiler reads is known without.
function(dicompiler_compile)
  set(single NAME MODEL PLATFORM TARGET STRATEGY PLAN OBJECTIVE COST OUTPUT)
  set(multiple SHAPE DEPENDS)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "${single}" "${multiple}")
  _dicompiler_check_arguments("${single};${multiple}")

  _dicompiler_path(model "${arg_MODEL}")
  set(line compile "${model}")
  set(depends "${model}")
  if(DEFINED arg_PLATFORM)
    # As dicompiler sees it: a name with an ending or a directory is that of a file.
    if(arg_PLATFORM MATCHES "[./]")
      _dicompiler_path(arg_PLATFORM "${arg_PLATFORM}")
      list(APPEND depends "${arg_PLATFORM}")
    endif()
    list(APPEND line --platform "${arg_PLATFORM}")
  endif()
  if(DEFINED arg_PLAN)
    _dicompiler_path(arg_PLAN "${arg_PLAN}")
    list(APPEND depends "${arg_PLAN}")
  endif()
  foreach(option TARGET STRATEGY PLAN OBJECTIVE COST)
    if(DEFINED arg_${option})
      string(TOLOWER "--${option}" word)
      list(APPEND line ${word} "${arg_${option}}")
    endif()
  endforeach()
  foreach(shape IN LISTS arg_SHAPE)
    list(APPEND line --shape "${shape}")
  endforeach()

  if(NOT DEFINED arg_OUTPUT)
    set(arg_OUTPUT "${arg_NAME}")
  endif()
  cmake_path(ABSOLUTE_PATH arg_OUTPUT BASE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}" NORMALIZE)
  cmake_path(GET arg_OUTPUT PARENT_PATH parent)
  set(own "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${arg_NAME}.dir")
  # CMake's translation of depfiles for Ninja loses the escapes of $ and # (up to CMake 4 at least): Ninja gets ours.
  set(target "${own}/artifact.stamp")
  set(byproducts "")
  if(CMAKE_GENERATOR MATCHES "Ninja")
    set(byproducts BYPRODUCTS "${arg_OUTPUT}/artifact.json")
    # Without these settings, CMake warns that the behaviour OLD is deprecated.
    if(POLICY CMP0218) # CMake 4.4 and newer
      cmake_policy(SET CMP0218 NEW)
      cmake_diagnostic(SET CMD_DEPRECATED IGNORE)
    else()
      set(CMAKE_WARN_DEPRECATED OFF)
    endif()
    cmake_policy(SET CMP0116 OLD)
    cmake_path(RELATIVE_PATH target BASE_DIRECTORY "${CMAKE_BINARY_DIR}") # Ninja's name for it
  endif()
  list(APPEND line -o "${arg_OUTPUT}" --depfile "${own}/artifact.d" --depfile-target "${target}")

  # Makefiles do not see by themselves that a command has become another: this file changes with it.
  list(JOIN line "\n" text)
  file(CONFIGURE OUTPUT "${own}/artifact.options" CONTENT "${text}\n" @ONLY)
  # An upgrade of dicompiler writes its program anew.
  list(GET dicompiler_COMMAND 0 program)
  if(IS_ABSOLUTE "${program}")
    list(APPEND depends "${program}")
  endif()
  # dicompiler leaves what has not changed alone: that it ran is told by a file of its own.
  add_custom_command(
    OUTPUT "${own}/artifact.stamp"
    ${byproducts}
    COMMAND ${CMAKE_COMMAND} -E make_directory "${parent}"
    COMMAND ${dicompiler_COMMAND} ${line} --print-outputs > "${own}/artifact.outputs"
    COMMAND ${CMAKE_COMMAND} -E touch "${own}/artifact.stamp"
    DEPENDS ${depends} "${own}/artifact.options" ${arg_DEPENDS}
    DEPFILE "${own}/artifact.d"
    COMMENT "Compiling ${arg_NAME}: ${arg_MODEL}"
    VERBATIM)
  add_custom_target(${arg_NAME} ALL DEPENDS "${own}/artifact.stamp")
  # Makefiles know what other targets make by its file alone: whoever uses this one waits for our target.
  if(NOT byproducts)
    add_custom_command(OUTPUT "${arg_OUTPUT}/artifact.json" COMMAND ${CMAKE_COMMAND} -E true DEPENDS ${arg_NAME})
  endif()
  set_target_properties(${arg_NAME} PROPERTIES DICOMPILER_OUTPUT "${arg_OUTPUT}")
endfunction()

# Of dicompiler_compile: whether its arguments, arg_…, are complete and known.
macro(_dicompiler_check_arguments known)
  string(REPLACE ";" ", " names "${known}")
  if(DEFINED arg_UNPARSED_ARGUMENTS)
    list(GET arg_UNPARSED_ARGUMENTS 0 first)
    message(FATAL_ERROR "dicompiler_compile: unknown argument '${first}': it takes ${names}")
  endif()
  if(DEFINED arg_KEYWORDS_MISSING_VALUES)
    list(GET arg_KEYWORDS_MISSING_VALUES 0 first)
    message(FATAL_ERROR "dicompiler_compile: argument ${first} has no value: give one, or leave ${first} out")
  endif()
  foreach(name NAME MODEL)
    if(NOT DEFINED arg_${name})
      message(FATAL_ERROR "dicompiler_compile: argument ${name} is missing: add ${name} and its value")
    endif()
  endforeach()
  foreach(shape IN LISTS arg_SHAPE)
    if(NOT shape MATCHES "=")
      message(FATAL_ERROR "dicompiler_compile: SHAPE has '${shape}': write input=1x3x224x224; arguments are ${names}")
    endif()
  endforeach()
  if(DEFINED arg_STRATEGY AND DEFINED arg_PLAN)
    message(FATAL_ERROR "dicompiler_compile: STRATEGY and PLAN exclude each other: a plan needs no strategy")
  endif()
  # A strategy may bring its own: manual{mapping=… platform=…}
  if(NOT DEFINED arg_PLATFORM AND NOT arg_STRATEGY MATCHES "platform=")
    message(FATAL_ERROR
      "dicompiler_compile: argument PLATFORM is missing: give a TOML file, or a built-in one such as rpi4x4")
  endif()
endmacro()

# Sets `variable` to the full path of a file: in the source directory where it is there, else in the binary directory.
function(_dicompiler_path variable given)
  set(path "${given}")
  cmake_path(ABSOLUTE_PATH path BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}" NORMALIZE)
  if(NOT EXISTS "${path}")
    set(path "${given}")
    cmake_path(ABSOLUTE_PATH path BASE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}" NORMALIZE)
  endif()
  set(${variable} "${path}" PARENT_SCOPE)
endfunction()
