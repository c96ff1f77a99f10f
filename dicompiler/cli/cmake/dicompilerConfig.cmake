# The CMake package of dicompiler: find_package(dicompiler CONFIG) gives the function dicompiler_compile.
#
# The variable dicompiler_COMMAND is the command to run. Default: the program `dicompiler` of the Python environment that
# has this package, or else the one on PATH. A command of several words is a list:
#
#   -Ddicompiler_COMMAND="python3;-m;dicompiler.cli"
cmake_minimum_required(VERSION 3.21...3.25) # 3.21 is the first version with depfiles for Makefiles.

if(NOT dicompiler_COMMAND)
  # This directory is …/lib/python3.11/site-packages/dicompiler/cli/cmake.
  find_program(dicompiler_COMMAND dicompiler HINTS "${CMAKE_CURRENT_LIST_DIR}/../../../../../bin"
    DOC "Command that compiles models: a program, or a list of words")
endif()
if(NOT dicompiler_COMMAND)
  set(dicompiler_FOUND FALSE)
  set(dicompiler_NOT_FOUND_MESSAGE
    "there is no program 'dicompiler': activate its Python environment, or give the command (-Ddicompiler_COMMAND=…)")
  return()
endif()

# Add a target that compiles a model into programs for the devices of a platform.
#
#   dicompiler_compile(NAME n MODEL m PLATFORM p
#     [TARGET t] [STRATEGY s | PLAN f] [OBJECTIVE o] [COST c] [SHAPE input=1x3x224x224 …]
#     [OPTIONS option-of-compile …] [OUTPUT dir] [DEPENDS file-or-target …])
#
# The target n belongs to `all`. It writes the artifact to the directory dir, which is relative to the binary directory
# (default: n), and compiles again if a file that was read, an argument or dicompiler has changed. The file
# dir/artifact.json is rewritten whenever a file in dir changes: let other commands depend on it. The target property
# DICOMPILER_OUTPUT is dir.
#
# MODEL, PLAN and a PLATFORM that is a file are looked up in the source directory, then in the binary directory. Files in
# the braces of TARGET, STRATEGY and COST, and files in OPTIONS, need full paths. OPTIONS are further options of
# `dicompiler compile`. DEPENDS are further prerequisites; the files that dicompiler reads are prerequisites anyway.
function(dicompiler_compile)
  set(single NAME MODEL PLATFORM TARGET STRATEGY PLAN OBJECTIVE COST OUTPUT)
  set(multiple SHAPE OPTIONS DEPENDS)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "${single}" "${multiple}")
  _dicompiler_check_arguments("${single};${multiple}")
  _dicompiler_check_directory("${CMAKE_CURRENT_SOURCE_DIR}")
  _dicompiler_check_directory("${CMAKE_CURRENT_BINARY_DIR}")

  _dicompiler_path(model "${arg_MODEL}")
  set(line compile "${model}")
  set(depends "${model}")
  if(DEFINED arg_PLATFORM)
    # As in dicompiler, a PLATFORM with an ending or a directory names a file. The target then depends on this file.
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
  list(APPEND line ${arg_OPTIONS})

  if(NOT DEFINED arg_OUTPUT)
    set(arg_OUTPUT "${arg_NAME}")
  endif()
  cmake_path(ABSOLUTE_PATH arg_OUTPUT BASE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}" NORMALIZE)
  cmake_path(GET arg_OUTPUT PARENT_PATH parent)
  set(own "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${arg_NAME}.dir")
  # CMake's translation of depfiles for Ninja loses the escapes of $ and # (also in CMake 4). With policy CMP0116 OLD,
  # Ninja reads the depfile of dicompiler unchanged.
  set(target "${own}/artifact.stamp")
  set(byproducts "")
  cmake_policy(PUSH)
  if(CMAKE_GENERATOR MATCHES "Ninja")
    set(byproducts BYPRODUCTS "${arg_OUTPUT}/artifact.json")
    # Without these settings, CMake warns that the behaviour OLD is deprecated.
    if(POLICY CMP0218) # CMake 4.4 and newer
      cmake_policy(SET CMP0218 NEW)
      cmake_diagnostic(PUSH)
      cmake_diagnostic(SET CMD_DEPRECATED IGNORE)
      cmake_policy(SET CMP0116 OLD)
      cmake_diagnostic(POP)
    else()
      set(CMAKE_WARN_DEPRECATED OFF)
      cmake_policy(SET CMP0116 OLD)
    endif()
    cmake_path(RELATIVE_PATH target BASE_DIRECTORY "${CMAKE_BINARY_DIR}") # Ninja's name of the target
  endif()
  list(APPEND line -o "${arg_OUTPUT}" --depfile "${own}/artifact.d" --depfile-target "${target}")

  # Makefiles do not notice a changed command. The prerequisite artifact.options contains the command, and so changes.
  list(JOIN line "\n" text)
  file(CONFIGURE OUTPUT "${own}/artifact.options" CONTENT "${text}\n" @ONLY)
  # The target depends on the program file of dicompiler, because an upgrade rewrites this file.
  list(GET dicompiler_COMMAND 0 program)
  if(IS_ABSOLUTE "${program}")
    list(APPEND depends "${program}")
  endif()
  # dicompiler does not touch unchanged files. Therefore a stamp file records that it ran.
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
  cmake_policy(POP)
  add_custom_target(${arg_NAME} ALL DEPENDS "${own}/artifact.stamp")
  # In Makefiles, a command that depends on artifact.json needs a rule for this file, which waits for the target. Only
  # another target can notice that artifact.json was deleted, before Make looks at the stamp.
  if(NOT byproducts)
    add_custom_target(${arg_NAME}_artifact
      COMMAND ${CMAKE_COMMAND} "-Dartifact=${arg_OUTPUT}/artifact.json" "-Dstamp=${own}/artifact.stamp"
              -P "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/removeStaleStamp.cmake"
      VERBATIM)
    add_dependencies(${arg_NAME} ${arg_NAME}_artifact)
    set_property(DIRECTORY APPEND PROPERTY ADDITIONAL_CLEAN_FILES "${arg_OUTPUT}/artifact.json")
    add_custom_command(OUTPUT "${arg_OUTPUT}/artifact.json" COMMAND ${CMAKE_COMMAND} -E true DEPENDS ${arg_NAME})
  endif()
  set_target_properties(${arg_NAME} PROPERTIES DICOMPILER_OUTPUT "${arg_OUTPUT}")
endfunction()

# Check the arguments of dicompiler_compile (the variables arg_…): all are known, and none is missing.
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
  # PLATFORM may be missing if the options of the strategy name a platform: manual{mapping=… platform=…}
  if(NOT DEFINED arg_PLATFORM AND NOT arg_STRATEGY MATCHES "platform=")
    message(FATAL_ERROR
      "dicompiler_compile: argument PLATFORM is missing: give a TOML file, or a built-in one such as rpi4x4")
  endif()
endmacro()

# Check that the build tool can read the name of a directory in a depfile.
function(_dicompiler_check_directory directory)
  set(unreadable "[]\"&'*;<=>?[^`|]")
  if(NOT CMAKE_GENERATOR MATCHES "Ninja")
    set(unreadable "[]\"&'*;<=>?[^`|%:]")
  endif()
  if(NOT WIN32 AND directory MATCHES "${unreadable}")
    message(FATAL_ERROR
      "dicompiler_compile: the directory ${directory} has '${CMAKE_MATCH_0}' in its name, which ${CMAKE_GENERATOR} "
      "cannot read: rename the directory")
  endif()
endfunction()

# Set `variable` to the full path of a file: in the source directory if it exists there, else in the binary directory.
function(_dicompiler_path variable given)
  set(path "${given}")
  cmake_path(ABSOLUTE_PATH path BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}" NORMALIZE)
  if(NOT EXISTS "${path}")
    set(path "${given}")
    cmake_path(ABSOLUTE_PATH path BASE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}" NORMALIZE)
  endif()
  set(${variable} "${path}" PARENT_SCOPE)
endfunction()
