#include "client/cpp/testing/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "client/cpp/testing/fake_server.h"

namespace gdn::client::testing {
namespace {

int64_t NowMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int64_t Deadline() { return NowMs() + std::chrono::milliseconds(kPatience).count(); }

int TemporaryFile(const std::string& content) {
  std::FILE* file = std::tmpfile();
  std::fwrite(content.data(), 1, content.size(), file);
  std::fflush(file);
  const int fd = fcntl(fileno(file), F_DUPFD_CLOEXEC, 3);
  std::fclose(file);
  lseek(fd, 0, SEEK_SET);
  return fd;
}

// {ours, the child's}
std::pair<int, int> MakePipe() {
  int fds[2] = {-1, -1};
  if (pipe2(fds, O_CLOEXEC) != 0) return {-1, -1};
  return {fds[0], fds[1]};
}

std::pair<int, int> MakeTerminal() {
  const int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  grantpt(master);
  unlockpt(master);
  char name[128];
  ptsname_r(master, name, sizeof(name));
  const int slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
  termios settings;
  tcgetattr(slave, &settings);
  cfmakeraw(&settings);  // What arrives is what was written.
  tcsetattr(slave, TCSANOW, &settings);
  return {master, slave};
}

void ReadInto(int* fd, std::string* text) {
  char buffer[4096];
  const ssize_t count = read(*fd, buffer, sizeof(buffer));
  if (count > 0) {
    text->append(buffer, static_cast<size_t>(count));
  } else {  // The end; a terminal reports it as EIO.
    close(*fd);
    *fd = -1;
  }
}

}  // namespace

Process::Process(const std::vector<std::string>& argv, const std::string& input,
                 const std::vector<std::string>& env, Stdout out) {
  const int in_fd = TemporaryFile(input);
  const auto [out_read, out_write] = out == Stdout::kTerminal ? MakeTerminal() : MakePipe();
  const auto [err_read, err_write] = MakePipe();
  std::vector<char*> arguments;
  for (const std::string& argument : argv) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  // Ours last: of two entries of one name, getenv() finds the first.
  std::vector<char*> environment;
  for (const std::string& entry : env) environment.push_back(const_cast<char*>(entry.c_str()));
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  environment.push_back(nullptr);

  // Only async-signal-safe calls until exec: gRPC's threads hold locks.
  pid_ = fork();
  if (pid_ == 0) {
    dup2(in_fd, STDIN_FILENO);
    dup2(out_write, STDOUT_FILENO);
    dup2(err_write, STDERR_FILENO);
    execve(arguments[0], arguments.data(), environment.data());
    _exit(127);
  }
  close(in_fd);
  close(out_write);
  close(err_write);
  out_fd_ = out_read;
  err_fd_ = err_read;
}

Process::~Process() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  CloseOutput();
  if (err_fd_ >= 0) close(err_fd_);
}

bool Process::WaitForOutput(const std::string& text) {
  const int64_t deadline = Deadline();
  while (out_.find(text) == std::string::npos) {
    if (!ReadSome(deadline)) return out_.find(text) != std::string::npos;
  }
  return true;
}

void Process::Signal(int signal) { kill(pid_, signal); }

void Process::CloseOutput() {
  if (out_fd_ >= 0) close(out_fd_);
  out_fd_ = -1;
}

int Process::Wait() {
  const int64_t deadline = Deadline();
  while (ReadSome(deadline)) {
  }
  int status = 0;
  while (true) {
    const pid_t done = waitpid(pid_, &status, WNOHANG);
    if (done == pid_) break;
    if (NowMs() >= deadline) return -1;  // The destructor kills it.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

bool Process::ReadSome(int64_t deadline_ms) {
  if (out_fd_ < 0 && err_fd_ < 0) return false;
  pollfd fds[2] = {{out_fd_, POLLIN, 0}, {err_fd_, POLLIN, 0}};
  const int64_t left = std::max<int64_t>(0, deadline_ms - NowMs());
  if (poll(fds, 2, static_cast<int>(left)) <= 0) return false;
  if (fds[0].revents != 0) ReadInto(&out_fd_, &out_);
  if (fds[1].revents != 0) ReadInto(&err_fd_, &err_);
  return true;
}

}  // namespace gdn::client::testing
