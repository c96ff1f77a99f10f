# Remove the stamp of a target if one of its outputs was deleted, so that Make runs the command again.
# Usage: cmake "-Doutputs=FILE;…" -Dstamp=FILE -P removeStaleStamp.cmake
foreach(output IN LISTS outputs)
  if(NOT EXISTS "${output}")
    file(REMOVE "${stamp}")
  endif()
endforeach()
