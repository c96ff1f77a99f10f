# Remove the stamp of an artifact that was deleted, so that Make compiles the model again.
# Usage: cmake -Dartifact=DIR/artifact.json -Dstamp=FILE -P removeStaleStamp.cmake
if(NOT EXISTS "${artifact}")
  file(REMOVE "${stamp}")
endif()
