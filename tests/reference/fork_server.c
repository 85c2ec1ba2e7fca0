// Loaded before a program's own libraries (LD_PRELOAD), this keeps the program ready behind its initialisation: for every
// request it forks, and the child runs main() as if it had just been started. Of a short run most is else the loading of
// libtorch, and then waiting for the disk, which such a run does not. fork_server.py is the other side.
//
// Standard input is a socket of packets. A request has, each with its zero, the working directory, how many words the command
// has, these words and the environment; three descriptors come with it, the child's standard input, output and error. What is
// sent back is the child's process id and, once it has ended, its status as waitpid() tells it. The end of the socket ends this.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kDescriptors = 3, kMostWords = 8192, kMostBytes = 1 << 17 };

typedef int Main(int, char**, char**);

// Of another library that is loaded before the program's (io_faults.c), which looks at the environment of each run.
extern void io_faults_begin(void) __attribute__((weak));

static Main* program_main;
static char request[kMostBytes + 1];  // ends with a zero whatever comes
static char* words[kMostWords + 2];

// A launcher of ranks reads /proc/self/cmdline to start its own command again. It is where the arguments were given: slashes
// before the absolute path of the program fill it up.
static void show_as_command_line(char** argv, int argc, const char* begin, size_t size) {
  char* place = argv[0];
  const size_t room = argv[argc - 1] + strlen(argv[argc - 1]) + 1 - place;
  if (size > room) _exit(126);
  memset(place, '/', room - size);
  memcpy(place + room - size, begin, size);
}

static int run_as_asked(int own_argc, char** own_argv, const int* given, size_t size) {
  char* at = request;
  const char* folder = at;
  at += strlen(at) + 1;
  const int count = atoi(at);
  at += strlen(at) + 1;
  char* command = at;
  size_t command_size = 0;
  int num_words = 0;
  for (; at < request + size && num_words <= kMostWords; at += strlen(at) + 1) {
    if (num_words == count) {  // the first of the environment
      command_size = at - command;
      words[num_words++] = NULL;
    }
    words[num_words++] = at;
  }
  if (command_size == 0 || num_words > kMostWords) _exit(126);
  for (int i = 0; i < kDescriptors; ++i) dup2(given[i], i);
  for (int i = 0; i < kDescriptors; ++i) close(given[i]);
  if (chdir(folder) != 0) _exit(126);
  show_as_command_line(own_argv, own_argc, command, command_size);
  environ = words + count + 1;
  if (io_faults_begin) io_faults_begin();
  return program_main(count, words, environ);
}

// Returns the size of the next request, or 0 when there is none any more.
static size_t receive(int* given) {
  union {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(kDescriptors * sizeof(int))];
  } control;
  struct iovec part = {.iov_base = request, .iov_len = kMostBytes};
  struct msghdr message = {
      .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
  ssize_t size;
  do size = recvmsg(STDIN_FILENO, &message, MSG_CMSG_CLOEXEC);
  while (size < 0 && errno == EINTR);
  const struct cmsghdr* found = size > 0 ? CMSG_FIRSTHDR(&message) : NULL;
  if (found == NULL || found->cmsg_type != SCM_RIGHTS) return 0;
  memcpy(given, CMSG_DATA(found), kDescriptors * sizeof(int));
  request[size] = 0;
  return size;
}

static int serve(int argc, char** argv, char** environment) {
  (void)environment;
  int given[kDescriptors];
  for (size_t size; (size = receive(given)) > 0;) {
    const pid_t child = fork();
    if (child == 0) return run_as_asked(argc, argv, given, size);  // what main() returns, ends this process
    for (int i = 0; i < kDescriptors; ++i) close(given[i]);
    send(STDIN_FILENO, &child, sizeof child, MSG_NOSIGNAL);
    int status = 0;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    send(STDIN_FILENO, &status, sizeof status, MSG_NOSIGNAL);
  }
  _exit(0);
}

// No test takes the power away: what a run has written need not have reached the disk before it goes on.
int fsync(int file) { return fcntl(file, F_GETFD) < 0 ? -1 : 0; }
int fdatasync(int file) { return fsync(file); }

int __libc_start_main(Main* its_main, int argc, char** argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void* stack_end) {
  typedef int Start(Main*, int, char**, void (*)(void), void (*)(void), void (*)(void), void*);
  Start* start = (Start*)dlsym(RTLD_NEXT, "__libc_start_main");
  program_main = its_main;
  return start(serve, argc, argv, init, fini, rtld_fini, stack_end);
}
