# The CMake package of dicompiler: find_package(dicompiler CONFIG) defines the functions dicompiler_opt, dicompiler_plan
# and dicompiler_compile.
#
# The variable dicompiler_COMMAND is the command to run. Default: the program `dicompiler` of the Python environment that
# has this package, or else the one on PATH. A command of several words is a list:
#
#   -Ddicompiler_COMMAND="python3;-m;dicompiler"
cmake_minimum_required(VERSION 3.21...3.25) # 3.21 is the first version with depfiles for Makefiles.

if(NOT dicompiler_COMMAND)
  # This directory is …/lib/python3.11/site-packages/dicompiler/cli/cmake.
  find_program(dicompiler_COMMAND dicompiler HINTS "${CMAKE_CURRENT_LIST_DIR}/../../../../../../bin"
    DOC "Command that compiles models: a program, or a list of words")
endif()
if(NOT dicompiler_COMMAND)
  set(dicompiler_FOUND FALSE)
  set(dicompiler_NOT_FOUND_MESSAGE
    "there is no program 'dicompiler': activate its Python environment, or give the command (-Ddicompiler_COMMAND=…)")
  return()
endif()

# These functions add a target that runs a command of dicompiler:
#
#   dicompiler_opt(NAME n MODEL m PIPELINE passes [PLATFORM p] [PLAN f] [SAVE_PLAN f]
#     [SHAPE input=1x3x224x224 …] [OPTIONS option-of-opt …] [OUTPUT file] [DEPENDS file-or-target …])
#
#   dicompiler_plan(NAME n MODEL m PLATFORM p [TARGET t] [STRATEGY s] [OBJECTIVE o] [COST c]
#     [SHAPE input=1x3x224x224 …] [OPTIONS option-of-plan …] [OUTPUT file] [DEPENDS file-or-target …])
#
#   dicompiler_compile(NAME n MODEL m PLATFORM p [TARGET t] [STRATEGY s | PLAN f] [OBJECTIVE o] [COST c]
#     [SHAPE input=1x3x224x224 …] [OPTIONS option-of-compile …] [OUTPUT dir] [DEPENDS file-or-target …])
#
# The target n belongs to `all`. It runs the command again if a file that was read, an argument or dicompiler has changed.
# OUTPUT is relative to the binary directory. The target property DICOMPILER_OUTPUT is its full path. The defaults are
# n.onnx for dicompiler_opt, n.json for dicompiler_plan, and the directory n for dicompiler_compile. Unchanged files keep
# their modification times. In the directory of an artifact, artifact.json is rewritten whenever a file changes: let other
# commands depend on it.
#
# MODEL, PLAN and a PLATFORM that is a file are looked up in the source directory, then in the binary directory. If one is
# the output of an earlier call, its target is a prerequisite. Files in the braces of PIPELINE, STRATEGY, TARGET and COST,
# and files in OPTIONS, need full paths. OPTIONS are further options of the command. DEPENDS are further prerequisites;
# the files that dicompiler reads are prerequisites anyway.

# Add a target that runs passes over a model (`dicompiler opt`). SAVE_PLAN is relative to the binary directory.
function(dicompiler_opt)
  _dicompiler_parse_arguments("NAME;MODEL;PIPELINE" "PLATFORM;PLAN;SAVE_PLAN;OUTPUT")
  _dicompiler_add_target(opt "Transforming" "${arg_NAME}.onnx" "")
  # A model above 2 GB has its weights in a second file. This file cannot be a byproduct, because Ninja runs a command
  # again while a byproduct does not exist.
  get_target_property(output ${arg_NAME} DICOMPILER_OUTPUT)
  set_property(TARGET ${arg_NAME} APPEND PROPERTY ADDITIONAL_CLEAN_FILES "${output}.data")
endfunction()

# Add a target that writes the plan of a strategy (`dicompiler plan`).
function(dicompiler_plan)
  _dicompiler_parse_arguments("NAME;MODEL" "PLATFORM;TARGET;STRATEGY;OBJECTIVE;COST;OUTPUT")
  _dicompiler_check_platform()
  _dicompiler_add_target(plan "Planning" "${arg_NAME}.json" "")
endfunction()

# Add a target that compiles a model into programs for the devices of a platform (`dicompiler compile`).
function(dicompiler_compile)
  _dicompiler_parse_arguments("NAME;MODEL" "PLATFORM;TARGET;STRATEGY;PLAN;OBJECTIVE;COST;OUTPUT")
  if(DEFINED arg_STRATEGY AND DEFINED arg_PLAN)
    message(FATAL_ERROR "dicompiler_compile: STRATEGY and PLAN exclude each other: a plan needs no strategy")
  endif()
  _dicompiler_check_platform()
  _dicompiler_add_target(compile "Compiling" "${arg_NAME}" "/artifact.json")
endfunction()

# Parse the arguments of the calling function into variables arg_…, and check that all are known and none is missing.
macro(_dicompiler_parse_arguments required optional)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "${required};${optional}" "SHAPE;OPTIONS;DEPENDS")
  string(REPLACE ";" ", " known "${required};${optional};SHAPE;OPTIONS;DEPENDS")
  if(DEFINED arg_UNPARSED_ARGUMENTS)
    list(GET arg_UNPARSED_ARGUMENTS 0 first)
    message(FATAL_ERROR "${CMAKE_CURRENT_FUNCTION}: unknown argument '${first}': it takes ${known}")
  endif()
  if(DEFINED arg_KEYWORDS_MISSING_VALUES)
    list(GET arg_KEYWORDS_MISSING_VALUES 0 first)
    message(FATAL_ERROR "${CMAKE_CURRENT_FUNCTION}: argument ${first} has no value: give one, or leave ${first} out")
  endif()
  foreach(name ${required})
    if(NOT DEFINED arg_${name})
      message(FATAL_ERROR "${CMAKE_CURRENT_FUNCTION}: argument ${name} is missing: add ${name} and its value")
    endif()
  endforeach()
  foreach(shape IN LISTS arg_SHAPE)
    if(NOT shape MATCHES "=")
      message(FATAL_ERROR
        "${CMAKE_CURRENT_FUNCTION}: SHAPE has '${shape}': write input=1x3x224x224; arguments are ${known}")
    endif()
  endforeach()
  _dicompiler_check_directory(${CMAKE_CURRENT_FUNCTION} "${CMAKE_CURRENT_SOURCE_DIR}")
  _dicompiler_check_directory(${CMAKE_CURRENT_FUNCTION} "${CMAKE_CURRENT_BINARY_DIR}")
endmacro()

# Check that there is a platform. Some strategies have a platform of their own: manual{mapping=… platform=…}
macro(_dicompiler_check_platform)
  if(NOT DEFINED arg_PLATFORM AND NOT arg_STRATEGY MATCHES "platform=")
    message(FATAL_ERROR
      "${CMAKE_CURRENT_FUNCTION}: argument PLATFORM is missing: give a TOML file, or a built-in one such as rpi4x4")
  endif()
endmacro()

# Add the target that runs `command` with the arguments in the variables arg_… . The message of the build begins with
# `verb`. The main output is the file OUTPUT, or the file `main` in the directory OUTPUT.
function(_dicompiler_add_target command verb default_output main)
  set(comment "${verb} ${arg_NAME}: ${arg_MODEL}")
  set(depends "")
  _dicompiler_add_input(MODEL)
  _dicompiler_add_input(PLAN)
  # Like dicompiler: a name with an ending or a directory is the name of a file.
  if(arg_PLATFORM MATCHES "[./]")
    _dicompiler_add_input(PLATFORM)
  endif()

  if(NOT DEFINED arg_OUTPUT)
    set(arg_OUTPUT "${default_output}")
  endif()
  set(parents "")
  foreach(keyword OUTPUT SAVE_PLAN)
    if(DEFINED arg_${keyword})
      cmake_path(ABSOLUTE_PATH arg_${keyword} BASE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}" NORMALIZE)
      cmake_path(GET arg_${keyword} PARENT_PATH parent)
      list(APPEND parents "${parent}")
    endif()
  endforeach()
  set(outputs "${arg_OUTPUT}${main}" ${arg_SAVE_PLAN})
  foreach(output IN LISTS outputs)
    if(output IN_LIST depends)
      message(FATAL_ERROR
        "dicompiler_${command}: ${output} is an input and an output of ${arg_NAME}: give the output another name")
    endif()
    get_property(producer GLOBAL PROPERTY "dicompiler_target_of_${output}")
    if(producer)
      message(FATAL_ERROR
        "dicompiler_${command}: ${output} is an output of ${producer} and of ${arg_NAME}: give one another OUTPUT")
    endif()
    set_property(GLOBAL PROPERTY "dicompiler_target_of_${output}" ${arg_NAME})
  endforeach()

  set(line ${command} "${arg_MODEL}")
  foreach(keyword PIPELINE PLATFORM TARGET STRATEGY PLAN SAVE_PLAN OBJECTIVE COST)
    if(DEFINED arg_${keyword})
      string(TOLOWER "--${keyword}" option)
      string(REPLACE "_" "-" option "${option}")
      list(APPEND line ${option} "${arg_${keyword}}")
    endif()
  endforeach()
  foreach(shape IN LISTS arg_SHAPE)
    list(APPEND line --shape "${shape}")
  endforeach()
  list(APPEND line ${arg_OPTIONS} -o "${arg_OUTPUT}")

  # CMake's translation of depfiles for Ninja loses the escapes of $ and # (also in CMake 4). With policy CMP0116 OLD,
  # Ninja reads the depfile of dicompiler unchanged.
  set(own "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${arg_NAME}.dir")
  set(stamp "${own}/dicompiler.stamp")
  set(depfile_target "${stamp}")
  set(byproducts "")
  cmake_policy(PUSH)
  if(CMAKE_GENERATOR MATCHES "Ninja")
    set(byproducts BYPRODUCTS ${outputs})
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
    cmake_path(RELATIVE_PATH depfile_target BASE_DIRECTORY "${CMAKE_BINARY_DIR}") # Ninja's name of the target
  endif()
  list(APPEND line --depfile "${own}/dicompiler.d" --depfile-target "${depfile_target}")

  # Makefiles do not notice a changed command. This file contains the command and is a prerequisite.
  list(JOIN line "\n" text)
  file(CONFIGURE OUTPUT "${own}/dicompiler.options" CONTENT "${text}\n" @ONLY)
  # An upgrade of dicompiler rewrites its program.
  list(GET dicompiler_COMMAND 0 program)
  if(IS_ABSOLUTE "${program}")
    list(APPEND depends "${program}")
  endif()
  # dicompiler does not touch unchanged files. Therefore a stamp file records that it ran.
  add_custom_command(
    OUTPUT "${stamp}"
    ${byproducts}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${parents}
    COMMAND ${dicompiler_COMMAND} ${line} --print-outputs > "${own}/dicompiler.outputs"
    COMMAND ${CMAKE_COMMAND} -E touch "${stamp}"
    DEPENDS ${depends} "${own}/dicompiler.options" ${arg_DEPENDS}
    DEPFILE "${own}/dicompiler.d"
    COMMENT "${comment}"
    VERBATIM)
  cmake_policy(POP)
  add_custom_target(${arg_NAME} ALL DEPENDS "${stamp}")
  set_target_properties(${arg_NAME} PROPERTIES DICOMPILER_OUTPUT "${arg_OUTPUT}")
  # In Makefiles, a command that depends on an output needs a rule for this file, which waits for the target. Only
  # another target can notice that an output was deleted, before Make looks at the stamp.
  if(NOT byproducts)
    add_custom_target(${arg_NAME}_outputs
      COMMAND ${CMAKE_COMMAND} "-Doutputs=${outputs}" "-Dstamp=${stamp}"
              -P "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/removeStaleStamp.cmake"
      VERBATIM)
    add_dependencies(${arg_NAME} ${arg_NAME}_outputs)
    set_property(TARGET ${arg_NAME} APPEND PROPERTY ADDITIONAL_CLEAN_FILES ${outputs})
    add_custom_command(OUTPUT ${outputs} COMMAND ${CMAKE_COMMAND} -E true DEPENDS ${arg_NAME})
  endif()
endfunction()

# Check that the build tool can read the name of a directory in a depfile.
function(_dicompiler_check_directory caller directory)
  set(unreadable "[]\"&'*;<=>?[^`|]")
  if(NOT CMAKE_GENERATOR MATCHES "Ninja")
    set(unreadable "[]\"&'*;<=>?[^`|%:]")
  endif()
  if(NOT WIN32 AND directory MATCHES "${unreadable}")
    message(FATAL_ERROR
      "${caller}: the directory ${directory} has '${CMAKE_MATCH_0}' in its name, which ${CMAKE_GENERATOR} "
      "cannot read: rename the directory")
  endif()
endfunction()

# Set arg_KEYWORD, the name of an input file, to its full path: in the source directory if it exists there, else in the
# binary directory. Append the file to `depends`, and also the target that writes it, which can be in another directory.
macro(_dicompiler_add_input keyword)
  if(DEFINED arg_${keyword})
    set(in_source "${arg_${keyword}}")
    cmake_path(ABSOLUTE_PATH in_source BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}" NORMALIZE)
    set(in_binary "${arg_${keyword}}")
    cmake_path(ABSOLUTE_PATH in_binary BASE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}" NORMALIZE)
    get_property(producer GLOBAL PROPERTY "dicompiler_target_of_${in_binary}")
    if(EXISTS "${in_source}" AND producer AND NOT in_source STREQUAL in_binary)
      message(FATAL_ERROR "dicompiler_${command}: ${keyword} ${arg_${keyword}} is a file in the source directory and "
        "the output of ${producer}: give the full path")
    endif()
    set(arg_${keyword} "${in_binary}")
    if(EXISTS "${in_source}")
      set(arg_${keyword} "${in_source}")
    endif()
    list(APPEND depends "${arg_${keyword}}" ${producer})
  endif()
endmacro()
