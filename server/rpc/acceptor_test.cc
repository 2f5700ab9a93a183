#include "server/rpc/acceptor.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "server/rpc/testing/captured_log.h"
#include "server/rpc/testing/rpc_fixture.h"

namespace gdn::rpc {
namespace {

constexpr std::chrono::seconds kPatience(20);

// Leaves the process without a free file descriptor while it lives.
class NoFreeFiles {
 public:
  NoFreeFiles() {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit low = before_;
    low.rlim_cur = 256;
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
    for (;;) {
      UniqueFd fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (fd.get() < 0) break;
      taken_.push_back(std::move(fd));
    }
    EXPECT_EQ(errno, EMFILE);
  }
  ~NoFreeFiles() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
  std::vector<UniqueFd> taken_;
};

UniqueFd NewSocket() { return UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

// Connects a socket made before, which takes no new file descriptor.
bool Connect(const UniqueFd& fd, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

// A server speaks first in HTTP/2, once the connection is taken.
bool HasSomethingToRead(const UniqueFd& fd) {
  pollfd polled = {fd.get(), POLLIN, 0};
  return poll(&polled, 1, static_cast<int>(std::chrono::milliseconds(kPatience).count())) == 1;
}

// What an acceptor hands over.
class Taken {
 public:
  Acceptor::Take Take() {
    return [this](int /*listener_fd*/, int fd) {
      std::lock_guard lock(mutex_);
      connections_.emplace_back(fd);
      grown_.notify_all();
    };
  }
  bool WaitForCount(size_t count) {
    std::unique_lock lock(mutex_);
    return grown_.wait_for(lock, kPatience, [&] { return connections_.size() >= count; });
  }
  int fd(size_t index) {
    std::lock_guard lock(mutex_);
    return connections_[index].get();
  }

 private:
  std::mutex mutex_;
  std::condition_variable grown_;
  std::vector<UniqueFd> connections_;
};

TEST(AcceptorTest, HandsConnectionsOver) {
  auto acceptor = Acceptor::Listen("127.0.0.1:0");
  ASSERT_TRUE(acceptor.ok()) << acceptor.status();
  const UniqueFd early = NewSocket();
  ASSERT_TRUE(Connect(early, (*acceptor)->port())) << "connections queue up before Start()";
  Taken taken;
  (*acceptor)->Start(taken.Take());
  ASSERT_TRUE(taken.WaitForCount(1));
  const UniqueFd late = NewSocket();
  ASSERT_TRUE(Connect(late, (*acceptor)->port()));
  ASSERT_TRUE(taken.WaitForCount(2));
  EXPECT_TRUE(fcntl(taken.fd(1), F_GETFL) & O_NONBLOCK);
  EXPECT_TRUE(fcntl(taken.fd(1), F_GETFD) & FD_CLOEXEC);
  ASSERT_EQ(send(late.get(), "x", 1, 0), 1);
  pollfd polled = {taken.fd(1), POLLIN, 0};
  EXPECT_EQ(poll(&polled, 1, 20'000), 1) << "the two ends are of one connection";
  (*acceptor)->Stop();
  EXPECT_FALSE(Connect(NewSocket(), (*acceptor)->port()));
  (*acceptor)->Stop();  // Again is fine.
}

TEST(AcceptorTest, OneNameMayHaveSeveralAddresses) {
  auto acceptor = Acceptor::Listen("localhost:0");
  ASSERT_TRUE(acceptor.ok()) << acceptor.status();
  EXPECT_TRUE(Connect(NewSocket(), (*acceptor)->port()));
  auto second = Acceptor::Listen("localhost:" + std::to_string((*acceptor)->port()));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  // Leading zeros are any port too.
  EXPECT_TRUE(Acceptor::Listen("127.0.0.1:000").ok());
}

TEST(AcceptorTest, WhatCannotBeListenedOnIsNamed) {
  for (const char* address : {"localhost", "127.0.0.1:", ":1", ""}) {
    EXPECT_EQ(Acceptor::Listen(address).status().code(), absl::StatusCode::kInvalidArgument)
        << address;
  }
  // 192.0.2.0/24 is for documentation: no machine has it.
  for (const char* address : {"192.0.2.1:0", "no-such-host.invalid:0"}) {
    const absl::Status status = Acceptor::Listen(address).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << address;
    EXPECT_NE(status.message().find(address), absl::string_view::npos) << status;
    EXPECT_NE(status.message().find("--listen"), absl::string_view::npos) << status;
  }
}

class OutOfFilesTest : public RpcTest {
 protected:
  CapturedLog log_;  // From before the server's threads to after them.
};

TEST_F(OutOfFilesTest, ConnectionsWaitAndAreServedLater) {
  ExpectServes();
  const UniqueFd waiting = NewSocket();
  {
    const NoFreeFiles no_free_files;
    ASSERT_TRUE(Connect(waiting, server_->port()));
    EXPECT_TRUE(log_.WaitFor("cannot accept connections"));
    EXPECT_TRUE(log_.WaitFor("ulimit -n"));
    ExpectServes();  // On the connection it has.
  }
  EXPECT_TRUE(HasSomethingToRead(waiting));
  EXPECT_TRUE(log_.WaitFor("accepting connections again"));
  channel_ = grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials());
  inference_ = v1::Inference::NewStub(channel_);
  ExpectServes();
}

TEST_F(OutOfFilesTest, StoppingDoesNotWaitForTheEndOfIt) {
  const UniqueFd waiting = NewSocket();
  const NoFreeFiles no_free_files;
  ASSERT_TRUE(Connect(waiting, server_->port()));
  EXPECT_TRUE(log_.WaitFor("cannot accept connections"));
  server_->Shutdown(0);
}

}  // namespace
}  // namespace gdn::rpc
