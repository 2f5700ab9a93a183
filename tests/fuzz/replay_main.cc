// Runs a fuzz target without a fuzzing engine: every file of a corpus, then seeded mutations of it.
//
//   some_fuzz [--mutations=N] [--seed=S] [--first=I] CORPUS...
//
// CORPUS is a file or a folder. Everything runs in a child process, so that an input which ends the
// process, however it does so, is still known: it is written to crash-<index> and named. Mutation I
// alone is run again by --first=I --mutations=1 with the same seed and corpus.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/mutator.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace gdn::fuzz {
namespace {

constexpr unsigned kSecondsPerInput = 10;
constexpr size_t kMaxRecorded = 1 << 20;

struct Options {
  uint64_t mutations = 0;
  uint64_t seed = 1;
  uint64_t first = 0;
  std::vector<std::string> paths;
};

// What the child is doing, in memory shared with the parent.
struct Progress {
  uint64_t replayed;
  uint64_t mutated;
  uint64_t current;  // Index of the mutation; meaningless while replaying.
  bool mutating;
  size_t size;
  char input[kMaxRecorded];
};

bool ParseNumber(std::string_view argument, std::string_view flag, uint64_t* value) {
  if (argument.substr(0, flag.size()) != flag) return false;
  const std::string_view digits = argument.substr(flag.size());
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), *value);
  return error == std::errc() && end == digits.data() + digits.size();
}

bool ParseOptions(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (ParseNumber(argument, "--mutations=", &options->mutations) ||
        ParseNumber(argument, "--seed=", &options->seed) ||
        ParseNumber(argument, "--first=", &options->first)) {
      continue;
    }
    if (argument.substr(0, 1) == "-") {
      std::fprintf(stderr, "unknown or malformed flag: %s\n", argv[i]);
      return false;
    }
    options->paths.emplace_back(argument);
  }
  return true;
}

bool ReadCorpus(const std::vector<std::string>& paths, std::vector<std::string>* corpus) {
  std::vector<std::filesystem::path> files;
  std::error_code error;
  for (const std::string& path : paths) {
    if (std::filesystem::is_directory(path, error)) {
      for (const auto& entry : std::filesystem::recursive_directory_iterator(path, error)) {
        if (entry.is_regular_file()) files.push_back(entry.path());
      }
    } else {
      files.emplace_back(path);
    }
  }
  std::sort(files.begin(), files.end());  // The folder's own order is not reproducible.
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) {
      std::fprintf(stderr, "cannot read %s\n", file.c_str());
      return false;
    }
    corpus->emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  return true;
}

void RunOne(const std::string& input, Progress* progress) {
  progress->size = std::min(input.size(), kMaxRecorded);
  std::memcpy(progress->input, input.data(), progress->size);
  alarm(kSecondsPerInput);
  // An exact copy on the heap, so that a sanitizer sees a read behind its end.
  const std::vector<uint8_t> bytes(input.begin(), input.end());
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

void RunAll(const Options& options, const std::vector<std::string>& corpus, Progress* progress) {
  for (const std::string& input : corpus) {
    RunOne(input, progress);
    ++progress->replayed;
  }
  Mutator mutator(corpus, options.seed);
  progress->mutating = true;
  for (uint64_t i = options.first; i < options.first + options.mutations; ++i) {
    progress->current = i;
    RunOne(mutator.Make(i), progress);
    ++progress->mutated;
  }
}

int ReportCrash(const Options& options, const Progress& progress, int status) {
  const std::string name =
      "crash-" + std::to_string(progress.mutating ? progress.current : progress.replayed);
  std::ofstream(name, std::ios::binary)
      .write(progress.input, static_cast<std::streamsize>(progress.size));
  std::fprintf(
      stderr, "FAILED (%s %d) in %s %llu, seed %llu; the input is in ./%s\n",
      WIFSIGNALED(status) ? "signal" : "exit status",
      WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status),
      progress.mutating ? "mutation" : "corpus file",
      static_cast<unsigned long long>(progress.mutating ? progress.current : progress.replayed),
      static_cast<unsigned long long>(options.seed), name.c_str());
  return 1;
}

int Main(int argc, char** argv) {
  Options options;
  std::vector<std::string> corpus;
  if (!ParseOptions(argc, argv, &options) || !ReadCorpus(options.paths, &corpus)) return 2;
  if (corpus.empty()) {
    std::fprintf(stderr, "the corpus is empty: name a folder with at least one file\n");
    return 2;
  }
  void* shared =
      mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) {
    std::perror("mmap");
    return 2;
  }
  auto* progress = static_cast<Progress*>(shared);  // Zero pages: a valid, empty record.
  const pid_t child = fork();
  if (child < 0) {
    std::perror("fork");
    return 2;
  }
  if (child == 0) {
    RunAll(options, corpus, progress);
    std::exit(0);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) {
    std::perror("waitpid");
    return 2;
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    return ReportCrash(options, *progress, status);
  }
  std::printf("%llu corpus files and %llu mutations, seed %llu: no crash\n",
              static_cast<unsigned long long>(progress->replayed),
              static_cast<unsigned long long>(progress->mutated),
              static_cast<unsigned long long>(options.seed));
  return 0;
}

}  // namespace
}  // namespace gdn::fuzz

int main(int argc, char** argv) { return gdn::fuzz::Main(argc, argv); }
