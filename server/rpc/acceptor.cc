#include "server/rpc/acceptor.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gdn::rpc {
namespace {

// Between two attempts to accept while the process is short of a resource.
constexpr int kPauseMs = 100;
// As gRPC sets it: the peer of a connection that is being written to must acknowledge within this.
constexpr int kUserTimeoutMs = 20'000;

struct AddressesDeleter {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, AddressesDeleter>;

absl::StatusOr<Addresses> Resolve(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--listen: '", address, "' is not host:port, as in 127.0.0.1:50051"));
  }
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &list);
  if (error != 0) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ",
                                               gai_strerror(error),
                                               "; give --listen an address of this machine"));
  }
  return Addresses(list);
}

void SetPort(sockaddr* address, int port) {
  const auto network_order = htons(static_cast<uint16_t>(port));
  if (address->sa_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address)->sin6_port = network_order;
  } else {
    reinterpret_cast<sockaddr_in*>(address)->sin_port = network_order;
  }
}

int PortOf(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

bool IsAnyIpv6(const sockaddr* address) {
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

// A listening socket, whose options its connections inherit; or errno.
UniqueFd OpenListener(const addrinfo& info, int* error) {
  UniqueFd fd(socket(info.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const auto set = [&fd](int level, int option, int value) {
    return setsockopt(fd.get(), level, option, &value, sizeof(value)) == 0;
  };
  if (fd.get() < 0 || !set(SOL_SOCKET, SO_REUSEADDR, 1) || !set(IPPROTO_TCP, TCP_NODELAY, 1) ||
      !set(IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs) ||
      (info.ai_family == AF_INET6 &&
       !set(IPPROTO_IPV6, IPV6_V6ONLY, IsAnyIpv6(info.ai_addr) ? 0 : 1)) ||
      bind(fd.get(), info.ai_addr, info.ai_addrlen) != 0 || listen(fd.get(), SOMAXCONN) != 0) {
    *error = errno;
    fd.Reset();
  }
  return fd;
}

// Listeners on every address that this machine has; empty and the first errno that counts if there
// is none, or one's port is taken.
std::vector<UniqueFd> OpenListeners(const addrinfo* addresses, int* port, int* error) {
  std::vector<UniqueFd> listeners;
  *error = 0;
  for (const addrinfo* info = addresses; info != nullptr; info = info->ai_next) {
    if (info->ai_family != AF_INET && info->ai_family != AF_INET6) continue;
    if (*port != 0) SetPort(info->ai_addr, *port);
    int this_error = 0;
    UniqueFd fd = OpenListener(*info, &this_error);
    if (fd.get() >= 0) {
      *port = PortOf(fd.get());
      listeners.push_back(std::move(fd));
    } else if (this_error == EADDRINUSE) {
      *error = this_error;
      return {};
    } else if (*error == 0) {
      *error = this_error;
    }
  }
  return listeners;
}

// What accept() says of a connection that ended in the queue, which it has taken from there.
bool IsOfOneConnection(int error) {
  switch (error) {
    case ECONNABORTED:
    case EHOSTDOWN:
    case EHOSTUNREACH:
    case EINTR:
    case ENETDOWN:
    case ENETUNREACH:
    case ENONET:
    case ENOPROTOOPT:
    case EPERM:  // A firewall's rule.
    case EPROTO:
    case ETIMEDOUT:
      return true;
    default:
      return false;
  }
}

}  // namespace

void UniqueFd::Reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Listen(const std::string& address) {
  auto addresses = Resolve(address);
  if (!addresses.ok()) return addresses.status();
  const std::string digits = address.substr(address.rfind(':') + 1);
  const bool any_port = digits.find_first_not_of('0') == std::string::npos;
  // A port that is free on the first address may be taken on the second.
  constexpr int kMaxAttempts = 16;
  std::vector<UniqueFd> listeners;
  int port = 0;
  int error = 0;
  for (int attempt = 0; attempt < (any_port ? kMaxAttempts : 1) && listeners.empty(); ++attempt) {
    if (any_port) {
      port = 0;
      for (addrinfo* info = addresses->get(); info != nullptr; info = info->ai_next) {
        SetPort(info->ai_addr, 0);
      }
    }
    listeners = OpenListeners(addresses->get(), &port, &error);
    if (error != EADDRINUSE) break;
  }
  if (listeners.empty()) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", address, " (", std::strerror(error),
        "): the port is taken, or the address is not one of this machine; choose another with "
        "--listen, where port 0 takes any free one"));
  }
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake.get() < 0) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address,
                                               ": eventfd: ", std::strerror(errno),
                                               "; raise the limit of open files (ulimit -n)"));
  }
  return std::unique_ptr<Acceptor>(new Acceptor(std::move(listeners), std::move(wake), port));
}

Acceptor::Acceptor(std::vector<UniqueFd> listeners, UniqueFd wake, int port)
    : listeners_(std::move(listeners)), wake_(std::move(wake)), port_(port) {}

void Acceptor::Start(Take take) {
  take_ = std::move(take);
  thread_ = std::thread([this] { Loop(); });
}

void Acceptor::Stop() {
  if (thread_.joinable()) {
    eventfd_write(wake_.get(), 1);
    thread_.join();
  }
  listeners_.clear();
}

void Acceptor::Loop() {
  std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}};
  for (const UniqueFd& listener : listeners_) polled.push_back({listener.get(), POLLIN, 0});
  bool pause = false;
  for (;;) {
    // In a pause a connection that waits must not end the wait: only Stop() and time may.
    poll(polled.data(), pause ? 1 : polled.size(), pause ? kPauseMs : -1);
    if (polled[0].revents != 0) return;
    pause = false;
    for (const UniqueFd& listener : listeners_) pause |= !AcceptSome(listener.get());
    if (!pause && complained_) {
      spdlog::info("accepting connections again");
      complained_ = false;
    }
  }
}

bool Acceptor::AcceptSome(int listener_fd) {
  constexpr int kMaxAtATime = 256;  // A flood must not keep Stop() waiting.
  for (int i = 0; i < kMaxAtATime; ++i) {
    const int fd = accept4(listener_fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      take_(listener_fd, fd);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return true;
    } else if (!IsOfOneConnection(errno)) {
      Complain(errno);
      return false;
    }
  }
  return true;
}

void Acceptor::Complain(int error) {
  constexpr std::chrono::seconds kInterval(10);  // A server at its limit runs short now and again.
  const auto now = std::chrono::steady_clock::now();
  if (complained_ || now < next_complaint_) return;
  complained_ = true;
  next_complaint_ = now + kInterval;
  spdlog::error(
      "cannot accept connections: {}; new ones wait until others end{}", std::strerror(error),
      error == EMFILE || error == ENFILE ? "; raise the limit of open files (ulimit -n)" : "");
}

}  // namespace gdn::rpc
