// File: acceptor.h
//
// The listening sockets of the server and the thread that accepts their connections. gRPC 1.51
// stops accepting for good at the first error of accept(), such as a process that is out of file
// descriptors for a moment; this one pauses and goes on. Connections that wait meanwhile stay in
// the kernel's queue.
#ifndef SERVER_RPC_ACCEPTOR_H_
#define SERVER_RPC_ACCEPTOR_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gdn::rpc {

// Owns a file descriptor.
class UniqueFd {
 public:
  explicit UniqueFd(int fd = -1) : fd_(fd) {}
  ~UniqueFd() { Reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = other.Release();
    }
    return *this;
  }
  int get() const { return fd_; }
  int Release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void Reset();

 private:
  int fd_;
};

class Acceptor {
 public:
  // Takes over `fd`, a connection accepted on `listener_fd`.
  using Take = std::function<void(int listener_fd, int fd)>;

  // Listens on all addresses that the host of host:port has; [::] is IPv6 and IPv4 alike. Port 0:
  // any one that is free on all of them. Connections queue up until Start(). INVALID_ARGUMENT: not
  // host:port. UNAVAILABLE: it cannot listen there; says why.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(const std::string& address);
  ~Acceptor() { Stop(); }
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  int port() const { return port_; }
  // Connections go to `take` from now on, on the acceptor's thread.
  void Start(Take take);
  // Connections are refused from now on; `take` is not running any more. Idempotent.
  void Stop();

 private:
  Acceptor(std::vector<UniqueFd> listeners, UniqueFd wake, int port);
  void Loop();
  // Accepts what has arrived; false if it cannot now, as for want of file descriptors.
  bool AcceptSome(int listener_fd);
  void Complain(int error);

  std::vector<UniqueFd> listeners_;
  const UniqueFd wake_;  // Readable once Stop() was called.
  const int port_;
  Take take_;
  std::thread thread_;

  // Of the thread: whether the log says that connections wait, and when it may say so again.
  bool complained_ = false;
  std::chrono::steady_clock::time_point next_complaint_{};
};

}  // namespace gdn::rpc

#endif  // SERVER_RPC_ACCEPTOR_H_
