// Loaded before a program's own libraries (LD_PRELOAD), this counts the uses of each place in the program that opens, reads,
// writes, maps, syncs, renames, removes, makes a folder, talks to a socket, asks io_uring or takes at least 1 MiB of memory, and
// makes one chosen use of one chosen place fail. io_faults.py is the other side.
//
// A place is the address in the program's own code that the call returns to, or that the call of the library returns to which
// calls. A thread of a library that has none of the program's code on its stack is a place of that library.
//   KILN_IO_LOG     the counts go into this file's name with the process id; what failed is told in FILE.fired
//   KILN_IO_FAULT   "kind module offset use fault rank": fault is an errno, or 0 for fewer bytes than were asked for, which are
//                   really moved; module is - for the program; rank is RANK of the process in which it fails, or -
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <liburing.h>
#include <link.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { kMostPlaces = 4096, kMostFrames = 96, kLeastMemory = 1 << 20, kNone = -1, kFewer = 0 };

// As io_faults.py reads them.
struct Place {
  char kind[16];
  char module[72];
  uint64_t offset;
  uint32_t uses, padding;
};
struct Table {
  char rank[16];
  uint64_t num_places;
  struct Place places[kMostPlaces];
};
struct Fault {
  char kind[16];
  char module[72];
  uint64_t offset;
  uint32_t use;
  int fault;
};

static struct Table* table;
static struct Fault chosen = {.fault = kNone};
static char fired_path[4096];
static uintptr_t program_base, program_begin, program_end;
static atomic_flag busy = ATOMIC_FLAG_INIT;
static __thread bool inside __attribute__((tls_model("initial-exec")));

static int take_program(struct dl_phdr_info* info, size_t size, void* data) {
  (void)size;
  (void)data;
  program_base = info->dlpi_addr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)* part = &info->dlpi_phdr[i];
    if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
    program_begin = program_base + part->p_vaddr;
    program_end = program_begin + part->p_memsz;
  }
  return 1;  // the first one is the program
}

static bool is_of_program(const void* address) {
  return (uintptr_t)address >= program_begin && (uintptr_t)address < program_end;
}

// Also called by fork_server.c, whose program has begun long before its environment is known.
void io_faults_begin(void) {
  const char* log = getenv("KILN_IO_LOG");
  if (!log || table) return;
  inside = true;
  dl_iterate_phdr(take_program, NULL);
  void* frames[2];
  backtrace(frames, 2);  // it loads a library when it is called first
  char path[4096];
  snprintf(path, sizeof path, "%s.%d", log, (int)getpid());
  snprintf(fired_path, sizeof fired_path, "%s.fired", log);
  const int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(struct Table)) != 0) _exit(125);
  void* mapped = mmap(NULL, sizeof(struct Table), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) _exit(125);
  close(fd);
  char rank[16];
  const char *text = getenv("KILN_IO_FAULT"), *own_rank = getenv("RANK") ? getenv("RANK") : "-";
  struct Fault asked;
  if (text && sscanf(text, "%15s %71s %lx %u %d %15s", asked.kind, asked.module, &asked.offset, &asked.use, &asked.fault, rank) == 6 &&
      strcmp(rank, own_rank) == 0)
    chosen = asked;
  snprintf(((struct Table*)mapped)->rank, sizeof rank, "%s", own_rank);
  table = mapped;
  inside = false;
}

__attribute__((constructor)) static void begin(void) { io_faults_begin(); }

static void place_of(const void* caller, struct Place* place) {
  strcpy(place->module, "-");
  const void* address = is_of_program(caller) ? caller : NULL;
  void* frames[kMostFrames];
  const int num_frames = address ? 0 : backtrace(frames, kMostFrames);
  for (int i = 0; i < num_frames && !address; ++i)
    if (is_of_program(frames[i])) address = frames[i];
  place->offset = (uintptr_t)address - program_base;
  if (address) return;
  Dl_info library;
  if (!dladdr(caller, &library) || !library.dli_fname) {
    strcpy(place->module, "?");
    place->offset = 0;
    return;
  }
  const char* slash = strrchr(library.dli_fname, '/');
  snprintf(place->module, sizeof place->module, "%s", slash ? slash + 1 : library.dli_fname);
  place->offset = (uintptr_t)caller - (uintptr_t)library.dli_fbase;
}

// Counts a use. Returns the fault that it is to have: kNone, kFewer or an errno.
static int use(const char* kind, const void* caller) {
  if (!table || inside) return kNone;
  inside = true;
  const int kept = errno;
  struct Place place;
  place_of(caller, &place);
  while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) continue;
  uint64_t i = 0;
  for (; i < table->num_places; ++i) {
    const struct Place* known = &table->places[i];
    if (known->offset == place.offset && strcmp(known->kind, kind) == 0 && strcmp(known->module, place.module) == 0) break;
  }
  if (i == kMostPlaces) _exit(125);
  struct Place* counted = &table->places[i];
  if (i == table->num_places) {
    snprintf(place.kind, sizeof place.kind, "%s", kind);
    place.uses = place.padding = 0;
    *counted = place;
    ++table->num_places;
  }
  const uint32_t number = ++counted->uses;
  atomic_flag_clear_explicit(&busy, memory_order_release);
  const bool is_chosen = chosen.fault != kNone && number == chosen.use && place.offset == chosen.offset &&
                         strcmp(chosen.kind, kind) == 0 && strcmp(chosen.module, place.module) == 0;
  errno = kept;
  inside = false;
  return is_chosen ? chosen.fault : kNone;
}

// Tells what failed. Of a descriptor it is the file that it is open on.
static void tell(const char* kind, int fault, const char* path, int fd, const char* second) {
  inside = true;
  char link[64], file[2048] = "", text[6144];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (path && strncmp(path, "/proc/self/fd/", 14) == 0) snprintf(link, sizeof link, "%s", path);
  if (!path || strncmp(path, "/proc/self/fd/", 14) == 0) {
    const ssize_t size = readlink(link, file, sizeof file - 1);
    file[size > 0 ? size : 0] = 0;
    path = file;
  }
  const int length = snprintf(text, sizeof text, "%s\t%d\t%s\t%s\n", kind, fault, path, second ? second : "");
  const int out = (int)syscall(SYS_openat, AT_FDCWD, fired_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (out >= 0) {
    syscall(SYS_write, out, text, length);
    syscall(SYS_close, out);
  }
  inside = false;
}

// Of the bytes of a call: half, in whole sectors where there are some.
static size_t fewer(size_t bytes) { return bytes >= 1024 ? bytes / 2 / 512 * 512 : (bytes + 1) / 2; }

#define CALLER __builtin_return_address(0)
// The definition of `name` that the program would have without this library.
#define NEXT(type, name, ...)                 \
  typedef type Next(__VA_ARGS__);             \
  static Next* next;                          \
  if (!next) next = (Next*)dlsym(RTLD_NEXT, name)
// Ends the call with an error where this use is to have one. REQUIRES for kFewer: the rest of the function moves fewer bytes.
#define FAULT(kind, failed, path, fd, second)                   \
  const int fault = use(kind, CALLER);                          \
  if (fault != kNone) tell(kind, fault, path, fd, second);      \
  if (fault > 0) {                                              \
    errno = fault;                                              \
    return failed;                                              \
  }

#define MODE(flags)                                                                    \
  mode_t mode = 0;                                                                     \
  if (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE) {                     \
    va_list list;                                                                      \
    va_start(list, flags);                                                             \
    mode = va_arg(list, mode_t);                                                       \
    va_end(list);                                                                      \
  }
#define OPEN(name)                                                                   \
  int name(const char* path, int flags, ...) {                                       \
    MODE(flags)                                                                      \
    NEXT(int, #name, const char*, int, ...);                                         \
    FAULT((flags) & O_CREAT ? "create" : "open", -1, path, -1, NULL)                 \
    return next(path, flags, mode);                                                  \
  }
OPEN(open)
OPEN(open64)
#define OPENAT(name)                                                                 \
  int name(int folder, const char* path, int flags, ...) {                           \
    MODE(flags)                                                                      \
    NEXT(int, #name, int, const char*, int, ...);                                    \
    FAULT((flags) & O_CREAT ? "create" : "open", -1, path, -1, NULL)                 \
    return next(folder, path, flags, mode);                                          \
  }
OPENAT(openat)
OPENAT(openat64)

// CALL(kind, type, failed, name, (parameters), (arguments), path, descriptor, second path)
#define UNPACK(...) __VA_ARGS__
#define CALL(kind, type, failed, name, parameters, arguments, path, fd, second) \
  type name(UNPACK parameters) {                                                \
    NEXT(type, #name, UNPACK parameters);                                       \
    FAULT(kind, failed, path, fd, second)                                       \
    return next arguments;                                                      \
  }
CALL("open", FILE*, NULL, fopen, (const char* path, const char* mode), (path, mode), path, -1, NULL)
CALL("open", FILE*, NULL, fopen64, (const char* path, const char* mode), (path, mode), path, -1, NULL)
CALL("open", FILE*, NULL, fdopen, (int fd, const char* mode), (fd, mode), NULL, fd, NULL)
CALL("open", DIR*, NULL, opendir, (const char* path), (path), path, -1, NULL)
CALL("open", DIR*, NULL, fdopendir, (int fd), (fd), NULL, fd, NULL)
CALL("create", int, -1, mkstemp, (char* path), (path), path, -1, NULL)
CALL("mkdir", char*, NULL, mkdtemp, (char* path), (path), path, -1, NULL)
CALL("mkdir", int, -1, mkdir, (const char* path, mode_t mode), (path, mode), path, -1, NULL)
CALL("mkdir", int, -1, mkdirat, (int at, const char* path, mode_t mode), (at, path, mode), path, -1, NULL)
CALL("readdir", struct dirent*, NULL, readdir, (DIR* folder), (folder), NULL, dirfd(folder), NULL)
CALL("readdir", struct dirent64*, NULL, readdir64, (DIR* folder), (folder), NULL, dirfd(folder), NULL)
CALL("sync", int, -1, fsync, (int fd), (fd), NULL, fd, NULL)
CALL("sync", int, -1, fdatasync, (int fd), (fd), NULL, fd, NULL)
CALL("sync", int, -1, msync, (void* address, size_t bytes, int flags), (address, bytes, flags), "", -1, NULL)
CALL("resize", int, -1, ftruncate, (int fd, off_t bytes), (fd, bytes), NULL, fd, NULL)
CALL("resize", int, -1, ftruncate64, (int fd, off64_t bytes), (fd, bytes), NULL, fd, NULL)
CALL("resize", int, -1, truncate, (const char* path, off_t bytes), (path, bytes), path, -1, NULL)
CALL("resize", int, -1, truncate64, (const char* path, off64_t bytes), (path, bytes), path, -1, NULL)
CALL("resize", int, -1, fallocate, (int fd, int mode, off_t from, off_t bytes), (fd, mode, from, bytes), NULL, fd, NULL)
CALL("resize", int, -1, fallocate64, (int fd, int mode, off64_t from, off64_t bytes), (fd, mode, from, bytes), NULL, fd, NULL)
CALL("rename", int, -1, rename, (const char* from, const char* to), (from, to), from, -1, to)
CALL("rename", int, -1, renameat, (int a, const char* from, int b, const char* to), (a, from, b, to), from, -1, to)
CALL("link", int, -1, link, (const char* from, const char* to), (from, to), from, -1, to)
CALL("link", int, -1, symlink, (const char* from, const char* to), (from, to), to, -1, from)
CALL("remove", int, -1, unlink, (const char* path), (path), path, -1, NULL)
CALL("remove", int, -1, unlinkat, (int at, const char* path, int flags), (at, path, flags), path, -1, NULL)
CALL("remove", int, -1, rmdir, (const char* path), (path), path, -1, NULL)
CALL("remove", int, -1, remove, (const char* path), (path), path, -1, NULL)
CALL("socket", int, -1, socket, (int domain, int type, int protocol), (domain, type, protocol), "", -1, NULL)
CALL("socket", int, -1, pipe, (int ends[2]), (ends), "", -1, NULL)
CALL("socket", int, -1, pipe2, (int ends[2], int flags), (ends, flags), "", -1, NULL)
CALL("connect", int, -1, bind, (int fd, const struct sockaddr* to, socklen_t size), (fd, to, size), NULL, fd, NULL)
CALL("connect", int, -1, listen, (int fd, int most), (fd, most), NULL, fd, NULL)
CALL("connect", int, -1, connect, (int fd, const struct sockaddr* to, socklen_t size), (fd, to, size), NULL, fd, NULL)
CALL("connect", int, -1, accept, (int fd, struct sockaddr* of, socklen_t* size), (fd, of, size), NULL, fd, NULL)
CALL("connect", int, -1, accept4, (int fd, struct sockaddr* of, socklen_t* size, int flags), (fd, of, size, flags), NULL, fd, NULL)
CALL("receive", ssize_t, -1, recvmsg, (int fd, struct msghdr* message, int flags), (fd, message, flags), NULL, fd, NULL)
CALL("send", ssize_t, -1, sendmsg, (int fd, const struct msghdr* message, int flags), (fd, message, flags), NULL, fd, NULL)

// MOVE(...): the same for a call that moves `bytes`, of which it can move fewer.
#define MOVE(kind, name, parameters, arguments, fd)      \
  ssize_t name(UNPACK parameters) {                      \
    NEXT(ssize_t, #name, UNPACK parameters);             \
    FAULT(kind, -1, NULL, fd, NULL)                      \
    if (fault == kFewer) bytes = fewer(bytes);           \
    return next arguments;                               \
  }
MOVE("read", read, (int fd, void* to, size_t bytes), (fd, to, bytes), fd)
MOVE("read", pread, (int fd, void* to, size_t bytes, off_t at), (fd, to, bytes, at), fd)
MOVE("read", pread64, (int fd, void* to, size_t bytes, off64_t at), (fd, to, bytes, at), fd)
MOVE("write", write, (int fd, const void* from, size_t bytes), (fd, from, bytes), fd)
MOVE("write", pwrite, (int fd, const void* from, size_t bytes, off_t at), (fd, from, bytes, at), fd)
MOVE("write", pwrite64, (int fd, const void* from, size_t bytes, off64_t at), (fd, from, bytes, at), fd)
MOVE("write", sendfile, (int to, int from, off_t* at, size_t bytes), (to, from, at, bytes), to)
MOVE("write", sendfile64, (int to, int from, off64_t* at, size_t bytes), (to, from, at, bytes), to)
MOVE("write", copy_file_range, (int from, off64_t* a, int to, off64_t* b, size_t bytes, unsigned flags), (from, a, to, b, bytes, flags), to)
MOVE("receive", recv, (int fd, void* to, size_t bytes, int flags), (fd, to, bytes, flags), fd)
MOVE("receive", recvfrom, (int fd, void* to, size_t bytes, int flags, struct sockaddr* of, socklen_t* size), (fd, to, bytes, flags, of, size), fd)
MOVE("send", send, (int fd, const void* from, size_t bytes, int flags), (fd, from, bytes, flags), fd)
MOVE("send", sendto, (int fd, const void* from, size_t bytes, int flags, const struct sockaddr* to, socklen_t size), (fd, from, bytes, flags, to, size), fd)

// What libraries call that were compiled with checks of their buffers.
MOVE("read", __read_chk, (int fd, void* to, size_t bytes, size_t room), (fd, to, bytes, room), fd)
MOVE("read", __pread_chk, (int fd, void* to, size_t bytes, off_t at, size_t room), (fd, to, bytes, at, room), fd)
MOVE("read", __pread64_chk, (int fd, void* to, size_t bytes, off64_t at, size_t room), (fd, to, bytes, at, room), fd)
MOVE("receive", __recv_chk, (int fd, void* to, size_t bytes, size_t room, int flags), (fd, to, bytes, room, flags), fd)
CALL("open", int, -1, __open_2, (const char* path, int flags), (path, flags), path, -1, NULL)
CALL("open", int, -1, __open64_2, (const char* path, int flags), (path, flags), path, -1, NULL)

#define MOVE_PARTS(kind, name)                                             \
  ssize_t name(int fd, const struct iovec* parts, int count) {             \
    NEXT(ssize_t, #name, int, const struct iovec*, int);                   \
    FAULT(kind, -1, NULL, fd, NULL)                                        \
    if (fault != kFewer || count == 0) return next(fd, parts, count);      \
    const struct iovec one = {parts->iov_base, fewer(parts->iov_len)};     \
    return next(fd, &one, 1);                                              \
  }
MOVE_PARTS("read", readv)
MOVE_PARTS("write", writev)

// Streams of the C library keep an error until it is asked for.
#define STREAM_FAULT(kind, failed)                            \
  const int fault = use(kind, CALLER);                        \
  if (fault != kNone) tell(kind, fault, NULL, fileno(file), NULL); \
  if (fault > 0) {                                            \
    file->_flags |= 0x20; /* _IO_ERR_SEEN */                  \
    errno = fault;                                            \
    return failed;                                            \
  }
size_t fread(void* to, size_t size, size_t count, FILE* file) {
  NEXT(size_t, "fread", void*, size_t, size_t, FILE*);
  STREAM_FAULT("read", 0)
  return next(to, size, fault == kFewer ? (count + 1) / 2 : count, file);
}
size_t fwrite(const void* from, size_t size, size_t count, FILE* file) {
  NEXT(size_t, "fwrite", const void*, size_t, size_t, FILE*);
  STREAM_FAULT("write", 0)
  if (fault == kFewer) file->_flags |= 0x20;  // fewer are written after an error only
  const size_t written = next(from, size, fault == kFewer ? count / 2 : count, file);
  if (fault == kFewer) errno = ENOSPC;
  return written;
}
int fflush(FILE* file) {
  NEXT(int, "fflush", FILE*);
  if (!file) return next(file);
  STREAM_FAULT("write", EOF)
  return next(file);
}
int fclose(FILE* file) {
  NEXT(int, "fclose", FILE*);
  const int fault = use("write", CALLER);
  if (fault != kNone) tell("write", fault, NULL, fileno(file), NULL);
  const int result = next(file);
  if (fault <= 0) return result;
  errno = fault;
  return EOF;
}

// Of memory, that of a file, and what the program itself asks for: allocators map theirs.
#define MMAP(name, offset_type)                                                                  \
  void* name(void* address, size_t bytes, int protection, int flags, int fd, offset_type at) {   \
    NEXT(void*, #name, void*, size_t, int, int, int, offset_type);                               \
    if ((flags & MAP_ANONYMOUS) && (!is_of_program(CALLER) || bytes < kLeastMemory))             \
      return next(address, bytes, protection, flags, fd, at);                                    \
    FAULT(flags & MAP_ANONYMOUS ? "memory" : "map", MAP_FAILED, fd < 0 ? "" : NULL, fd, NULL)    \
    return next(address, bytes, protection, flags, fd, at);                                      \
  }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

static bool has_no_memory(size_t bytes, const void* caller) {
  if (bytes < kLeastMemory) return false;
  const int fault = use("memory", caller);
  if (fault > 0) tell("memory", fault, "", -1, NULL);
  return fault > 0;
}
#define MEMORY(name, bytes, parameters, arguments)    \
  void* name(UNPACK parameters) {                     \
    NEXT(void*, #name, UNPACK parameters);            \
    if (has_no_memory(bytes, CALLER)) {               \
      errno = ENOMEM;                                 \
      return NULL;                                    \
    }                                                 \
    return next arguments;                            \
  }
MEMORY(malloc, size, (size_t size), (size))
MEMORY(calloc, count* size, (size_t count, size_t size), (count, size))
MEMORY(realloc, size, (void* old, size_t size), (old, size))
MEMORY(memalign, size, (size_t alignment, size_t size), (alignment, size))
MEMORY(aligned_alloc, size, (size_t alignment, size_t size), (alignment, size))
MEMORY(mallocx, size, (size_t size, int flags), (size, flags))
int posix_memalign(void** result, size_t alignment, size_t size) {
  NEXT(int, "posix_memalign", void**, size_t, size_t);
  return has_no_memory(size, CALLER) ? ENOMEM : next(result, alignment, size);
}
// operator new of every kind, by the names that C++ gives them.
extern void _ZSt17__throw_bad_allocv(void) __attribute__((weak, noreturn));
#define NEW(name, parameters, arguments)                              \
  void* name(UNPACK parameters) {                                     \
    NEXT(void*, #name, UNPACK parameters);                            \
    if (has_no_memory(size, CALLER)) _ZSt17__throw_bad_allocv();      \
    return next arguments;                                            \
  }
NEW(_Znwm, (size_t size), (size))
NEW(_Znam, (size_t size), (size))
NEW(_ZnwmSt11align_val_t, (size_t size, size_t alignment), (size, alignment))
NEW(_ZnamSt11align_val_t, (size_t size, size_t alignment), (size, alignment))
MEMORY(_ZnwmRKSt9nothrow_t, size, (size_t size, const void* tag), (size, tag))
MEMORY(_ZnamRKSt9nothrow_t, size, (size_t size, const void* tag), (size, tag))

// io_uring, at the calls of its library: what is submitted becomes a request that does nothing, and its result the error.
int io_uring_queue_init(unsigned entries, struct io_uring* ring, unsigned flags) {
  NEXT(int, "io_uring_queue_init", unsigned, struct io_uring*, unsigned);
  const int fault = use("ring", CALLER);
  if (fault <= 0) return next(entries, ring, flags);
  tell("ring", fault, "", -1, NULL);
  return -fault;
}
CALL("ring", struct io_uring_probe*, NULL, io_uring_get_probe_ring, (struct io_uring * ring), (ring), "", -1, NULL)

int io_uring_submit_and_wait(struct io_uring* ring, unsigned wait) {
  NEXT(int, "io_uring_submit_and_wait", struct io_uring*, unsigned);
  static uint64_t failing;
  static int failing_with;
  const int fault = use("ring", CALLER);
  if (fault > 0) {
    tell("ring", fault, "", -1, NULL);
    return -fault;
  }
  for (unsigned i = ring->sq.sqe_head; i != ring->sq.sqe_tail; ++i) {
    struct io_uring_sqe* entry = &ring->sq.sqes[i & *ring->sq.kring_mask];
    const char* kind = entry->opcode == IORING_OP_WRITE ? "ring-write" : "ring-read";
    const int of_entry = use(kind, CALLER);
    if (of_entry == kNone) continue;
    tell(kind, of_entry, NULL, entry->fd, NULL);
    if (of_entry == kFewer) {
      entry->len = (unsigned)fewer(entry->len);
      continue;
    }
    failing = entry->user_data;
    failing_with = of_entry;
    entry->opcode = IORING_OP_NOP;
    entry->fd = -1;
    entry->off = entry->addr = entry->len = 0;
  }
  const int result = next(ring, wait);
  unsigned head;
  struct io_uring_cqe* done;
  io_uring_for_each_cqe(ring, head, done) {
    if (failing_with == 0 || done->user_data != failing) continue;
    done->res = -failing_with;
    failing_with = 0;
  }
  return result;
}
