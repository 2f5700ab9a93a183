# What `cmake --install` lays down: the kernel library with its headers and, with the server, the two
# programs and the demo model. The component `runtime` is what a container image holds.
include(GNUInstallDirs)

install(TARGETS gdn_kernels_shared LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT kernels)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/kernels/include/gdn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT kernels)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT runtime)
if(GDN_SERVER)
  foreach(program gdn_server gdnctl)
    if(TARGET ${program})
      install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)
    endif()
  endforeach()
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/deploy/models/demo-gdn-7m
    DESTINATION ${CMAKE_INSTALL_DATADIR}/gdn/models COMPONENT runtime)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/proto/gdn ${PROJECT_SOURCE_DIR}/proto/google
    DESTINATION ${CMAKE_INSTALL_DATADIR}/gdn/proto COMPONENT protocol FILES_MATCHING PATTERN "*.proto")
endif()
