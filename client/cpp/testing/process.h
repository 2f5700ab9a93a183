// A child process under test, with a deadline on everything.
#ifndef CLIENT_CPP_TESTING_PROCESS_H_
#define CLIENT_CPP_TESTING_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace gdn::client::testing {

class Process {
 public:
  enum class Stdout { kPipe, kTerminal };

  // Runs argv[0] with `input` as its standard input, read from a file. The environment is ours with
  // `env` ("A=b") on top.
  Process(const std::vector<std::string>& argv, const std::string& input,
          const std::vector<std::string>& env = {}, Stdout out = Stdout::kPipe);
  ~Process();  // Kills it if it still runs.
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // Reads until standard output holds `text`; false if it never did.
  bool WaitForOutput(const std::string& text);
  void Signal(int signal);
  void CloseOutput();
  // Reads to the end and waits: the exit code, 128 + the signal that ended it, or -1 if it had to
  // be killed after kPatience.
  int Wait();

  const std::string& out() const { return out_; }
  const std::string& err() const { return err_; }

 private:
  // Reads what there is within the deadline; false at the end of both streams or out of time.
  bool ReadSome(int64_t deadline_ms);

  pid_t pid_ = -1;
  int out_fd_ = -1;
  int err_fd_ = -1;
  std::string out_;
  std::string err_;
};

}  // namespace gdn::client::testing

#endif  // CLIENT_CPP_TESTING_PROCESS_H_
