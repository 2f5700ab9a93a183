# What `cmake --install` lays down: the kernel library with its headers and, with the server, the two
# programs.
include(GNUInstallDirs)

install(TARGETS gdn_kernels_shared LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/kernels/include/gdn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(GDN_SERVER)
  foreach(program gdn_server gdnctl)
    if(TARGET ${program})
      install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
    endif()
  endforeach()
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/proto/gdn ${PROJECT_SOURCE_DIR}/proto/google
    DESTINATION ${CMAKE_INSTALL_DATADIR}/gdn/proto FILES_MATCHING PATTERN "*.proto")
endif()
