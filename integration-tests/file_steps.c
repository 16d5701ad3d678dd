/* Counts the steps that change files below one folder, and dies or fails at a chosen one (LD_PRELOAD, Linux).

A step is a call of libc that makes, writes, syncs, renames, links or removes a file or folder: Python's, the C++ of torch.save and
the Rust of safetensors all go through these names, also where they call syscall(). Not seen: writes into mapped memory, and what
stdio writes by itself (fwrite, fflush); test_checkpoint_faults.py compares with strace that nothing of a save is missed.
The process steers it through the functions file_steps_* (file_steps.py). Steps are made one at a time, so that the log has their order. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN = 1, WRITE = 2, SYNC = 4, RENAME = 8, UNLINK = 16, MKDIR = 32, RMDIR = 64, TRUNCATE = 128, LINK = 256 };
static const char *const NAMES[] = {"open", "write", "sync", "rename", "unlink", "mkdir", "rmdir", "truncate", "link"};
#define LONGEST (PATH_MAX + 64)
#define EXCHANGE 2

static pthread_mutex_t one_at_a_time = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static char watched[LONGEST];
static size_t watched_length;
static volatile int on;
static int log_to = -1;
static long count, die_at, fail_at;
static int fail_with, fail_always, fail_half, no_exchange;
static unsigned fail_kinds;

struct step { enum kind kind; long number; char path[LONGEST], other[LONGEST]; long detail; };

static long (*plain_syscall)(long, ...);
__attribute__((constructor)) static void load(void) { plain_syscall = dlsym(RTLD_NEXT, "syscall"); }
#define REAL(name, type) static __typeof__(type) real; if (!real) real = (__typeof__(type))dlsym(RTLD_NEXT, #name)

/* --- steering --- */

void file_steps_begin(const char *folder, int log_fd) {
    snprintf(watched, sizeof watched, "%s", folder);
    watched_length = strlen(watched);
    log_to = log_fd;
    count = die_at = fail_at = 0;
    on = 1;
}
void file_steps_die_at(long number) { die_at = number; }
void file_steps_fail_at(long number, int error, unsigned kinds, int always, int half) {
    fail_with = error; fail_kinds = kinds; fail_always = always; fail_half = half; fail_at = number;
}
void file_steps_no_exchange(int yes) { no_exchange = yes; }
long file_steps_end(void) { on = 0; return count; }

/* --- paths --- */

static void of_descriptor(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, out, LONGEST - 1);
    out[length < 0 ? 0 : length] = 0;
}

static void absolute(int folder_fd, const char *path, char *out) {
    char base[PATH_MAX];
    if (path[0] == '/') { snprintf(out, LONGEST, "%s", path); return; }
    if (folder_fd == AT_FDCWD) { if (!getcwd(base, sizeof base)) base[0] = 0; }
    else { char whole[LONGEST]; of_descriptor(folder_fd, whole); snprintf(base, sizeof base, "%.*s", PATH_MAX - 1, whole); }
    snprintf(out, LONGEST, "%s/%.*s", base, (int)(LONGEST - 2 - strlen(base)), path);
}

static int below(const char *path) {
    return !strncmp(path, watched, watched_length) && (path[watched_length] == '/' || !path[watched_length]);
}

/* --- one step: begin() holds the lock when it returns 1 or -1; end() lets go of it --- */

static int begin(struct step *step) {
    if (!below(step->path) && !(step->other[0] && below(step->other))) return 0;
    pthread_mutex_lock(&one_at_a_time);
    if (!on) { pthread_mutex_unlock(&one_at_a_time); return 0; }
    step->number = ++count;
    if (die_at && count == die_at) plain_syscall(SYS_kill, plain_syscall(SYS_getpid), SIGKILL);
    int hit = fail_at && (step->kind & fail_kinds) && (fail_always ? count >= fail_at : count == fail_at);
    if (hit) { errno = fail_with; return -1; }
    if (no_exchange && step->kind == RENAME && step->detail) { errno = EINVAL; return -1; }
    return 1;
}

static void end(struct step *step, long result) {
    int saved = errno;
    if (log_to >= 0) {
        char line[2 * LONGEST + 128];
        int length = snprintf(line, sizeof line, "%ld\t%s\t%s\t%s\t%ld\t%ld\t%d\t%ld\n", step->number,
                              NAMES[__builtin_ctz(step->kind)], step->path, step->other, step->detail, result,
                              result < 0 ? saved : 0, plain_syscall(SYS_gettid));
        plain_syscall(SYS_write, log_to, line, (size_t)length);
    }
    pthread_mutex_unlock(&one_at_a_time);
    errno = saved;
}

/* do `call` as the step that was filled in; `type` is what it returns, failure is -1 */
#define STEP(step, type, call) do { \
    int goes = begin(&(step)); \
    if (!goes) return call; \
    type result = goes > 0 ? (type)(call) : (type)-1; \
    end(&(step), (long)result); \
    return result; \
} while (0)

/* --- opening --- */

static int makes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)); }

#define OPENS(name, signature, folder, call) \
    int name signature { \
        REAL(name, int (*) signature); \
        mode_t mode = 0; \
        if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); } \
        if (!on || !makes(flags)) return call; \
        struct step step = {.kind = OPEN, .detail = flags}; \
        absolute(folder, path, step.path); \
        STEP(step, int, call); \
    }
OPENS(open, (const char *path, int flags, ...), AT_FDCWD, real(path, flags, mode))
OPENS(open64, (const char *path, int flags, ...), AT_FDCWD, real(path, flags, mode))
OPENS(openat, (int at, const char *path, int flags, ...), at, real(at, path, flags, mode))
OPENS(openat64, (int at, const char *path, int flags, ...), at, real(at, path, flags, mode))

#define OPENS_PLAINLY(name, signature, flags, call) \
    int name signature { \
        REAL(name, int (*) signature); \
        if (!on || !makes(flags)) return call; \
        struct step step = {.kind = OPEN, .detail = flags}; \
        absolute(AT_FDCWD, path, step.path); \
        STEP(step, int, call); \
    }
OPENS_PLAINLY(creat, (const char *path, mode_t mode), O_WRONLY | O_CREAT | O_TRUNC, real(path, mode))
OPENS_PLAINLY(creat64, (const char *path, mode_t mode), O_WRONLY | O_CREAT | O_TRUNC, real(path, mode))
OPENS_PLAINLY(__open_2, (const char *path, int flags), flags, real(path, flags))
OPENS_PLAINLY(__open64_2, (const char *path, int flags), flags, real(path, flags))

static FILE *opens_stream(FILE *(*real)(const char *, const char *), const char *path, const char *how) {
    int flags = how[0] == 'w' ? O_WRONLY | O_CREAT | O_TRUNC : how[0] == 'a' ? O_WRONLY | O_CREAT : strchr(how, '+') ? O_RDWR : O_RDONLY;
    if (!on || !makes(flags)) return real(path, how);
    struct step step = {.kind = OPEN, .detail = flags};
    absolute(AT_FDCWD, path, step.path);
    int goes = begin(&step);
    if (!goes) return real(path, how);
    FILE *result = goes > 0 ? real(path, how) : NULL;
    end(&step, result ? fileno(result) : -1);
    return result;
}
FILE *fopen(const char *path, const char *how) { REAL(fopen, FILE *(*)(const char *, const char *)); return opens_stream(real, path, how); }
FILE *fopen64(const char *path, const char *how) { REAL(fopen64, FILE *(*)(const char *, const char *)); return opens_stream(real, path, how); }

/* --- what is done with a descriptor --- */

#define WITH_DESCRIPTOR(kind_of, type, name, signature, asked, call) \
    type name signature { \
        REAL(name, type (*) signature); \
        if (!on) return call; \
        struct step step = {.kind = kind_of, .detail = (long)(asked)}; \
        of_descriptor(fd, step.path); \
        STEP(step, type, call); \
    }

/* a disk that becomes full takes the first half of what is written to it, and nothing of the rest */
static ssize_t half_of(struct step *step, int fd, const void *bytes, size_t size, off64_t at) {
    fail_half = 0;
    fail_at = step->number + 1;
    ssize_t result = at < 0 ? plain_syscall(SYS_write, fd, bytes, size / 2) : plain_syscall(SYS_pwrite64, fd, bytes, size / 2, at);
    end(step, result);
    return result;
}
#define WRITES(name, signature, position, call) \
    ssize_t name signature { \
        REAL(name, ssize_t (*) signature); \
        if (!on) return call; \
        struct step step = {.kind = WRITE, .detail = (long)size}; \
        of_descriptor(fd, step.path); \
        int goes = begin(&step); \
        if (!goes) return call; \
        if (goes < 0 && fail_half && size > 1) return half_of(&step, fd, bytes, size, position); \
        ssize_t result = goes > 0 ? call : -1; \
        end(&step, result); \
        return result; \
    }
WRITES(write, (int fd, const void *bytes, size_t size), -1, real(fd, bytes, size))
WRITES(pwrite, (int fd, const void *bytes, size_t size, off_t at), at, real(fd, bytes, size, at))
WRITES(pwrite64, (int fd, const void *bytes, size_t size, off64_t at), at, real(fd, bytes, size, at))
WITH_DESCRIPTOR(WRITE, ssize_t, writev, (int fd, const struct iovec *parts, int n), n, real(fd, parts, n))
WITH_DESCRIPTOR(WRITE, ssize_t, pwritev, (int fd, const struct iovec *parts, int n, off_t at), n, real(fd, parts, n, at))
WITH_DESCRIPTOR(WRITE, ssize_t, pwritev64, (int fd, const struct iovec *parts, int n, off64_t at), n, real(fd, parts, n, at))
WITH_DESCRIPTOR(WRITE, ssize_t, pwritev2, (int fd, const struct iovec *parts, int n, off_t at, int how), n, real(fd, parts, n, at, how))
WITH_DESCRIPTOR(WRITE, ssize_t, pwritev64v2, (int fd, const struct iovec *parts, int n, off64_t at, int how), n, real(fd, parts, n, at, how))
WITH_DESCRIPTOR(WRITE, ssize_t, sendfile, (int fd, int from, off_t *at, size_t size), size, real(fd, from, at, size))
WITH_DESCRIPTOR(WRITE, ssize_t, sendfile64, (int fd, int from, off64_t *at, size_t size), size, real(fd, from, at, size))
WITH_DESCRIPTOR(SYNC, int, fsync, (int fd), 0, real(fd))
WITH_DESCRIPTOR(SYNC, int, fdatasync, (int fd), 0, real(fd))
WITH_DESCRIPTOR(TRUNCATE, int, ftruncate, (int fd, off_t size), size, real(fd, size))
WITH_DESCRIPTOR(TRUNCATE, int, ftruncate64, (int fd, off64_t size), size, real(fd, size))
WITH_DESCRIPTOR(WRITE, int, fallocate, (int fd, int how, off_t at, off_t size), size, real(fd, how, at, size))
WITH_DESCRIPTOR(WRITE, int, fallocate64, (int fd, int how, off64_t at, off64_t size), size, real(fd, how, at, size))

ssize_t copy_file_range(int from, off64_t *from_at, int fd, off64_t *at, size_t size, unsigned how) {
    REAL(copy_file_range, ssize_t (*)(int, off64_t *, int, off64_t *, size_t, unsigned));
    if (!on) return real(from, from_at, fd, at, size, how);
    struct step step = {.kind = WRITE, .detail = (long)size};
    of_descriptor(fd, step.path);
    STEP(step, ssize_t, real(from, from_at, fd, at, size, how));
}

/* these return the error itself */
static int allocates(int (*real)(int, off64_t, off64_t), int fd, off64_t at, off64_t size) {
    if (!on) return real(fd, at, size);
    struct step step = {.kind = WRITE, .detail = (long)size};
    of_descriptor(fd, step.path);
    int goes = begin(&step);
    if (!goes) return real(fd, at, size);
    int result = goes > 0 ? real(fd, at, size) : fail_with;
    end(&step, result ? -1 : 0);
    return result;
}
int posix_fallocate(int fd, off_t at, off_t size) { REAL(posix_fallocate, int (*)(int, off_t, off_t)); return allocates(real, fd, at, size); }
int posix_fallocate64(int fd, off64_t at, off64_t size) { REAL(posix_fallocate64, int (*)(int, off64_t, off64_t)); return allocates(real, fd, at, size); }

/* --- what is done with names --- */

#define WITH_NAME(kind_of, name, signature, folder, asked, call) \
    int name signature { \
        REAL(name, int (*) signature); \
        if (!on) return call; \
        struct step step = {.kind = kind_of, .detail = (long)(asked)}; \
        absolute(folder, path, step.path); \
        STEP(step, int, call); \
    }
WITH_NAME(UNLINK, unlink, (const char *path), AT_FDCWD, 0, real(path))
WITH_NAME(UNLINK, remove, (const char *path), AT_FDCWD, 0, real(path))
WITH_NAME(((how & AT_REMOVEDIR) ? RMDIR : UNLINK), unlinkat, (int at, const char *path, int how), at, 0, real(at, path, how))
WITH_NAME(RMDIR, rmdir, (const char *path), AT_FDCWD, 0, real(path))
WITH_NAME(MKDIR, mkdir, (const char *path, mode_t mode), AT_FDCWD, mode, real(path, mode))
WITH_NAME(MKDIR, mkdirat, (int at, const char *path, mode_t mode), at, mode, real(at, path, mode))
WITH_NAME(TRUNCATE, truncate, (const char *path, off_t size), AT_FDCWD, size, real(path, size))
WITH_NAME(TRUNCATE, truncate64, (const char *path, off64_t size), AT_FDCWD, size, real(path, size))
/* a new name whose content stands in the call: as an open that makes it */
WITH_NAME(OPEN, symlink, (const char *to, const char *path), AT_FDCWD, O_CREAT, real(to, path))
WITH_NAME(OPEN, symlinkat, (const char *to, int at, const char *path), at, O_CREAT, real(to, at, path))

#define WITH_TWO_NAMES(kind_of, name, signature, from_at, to_at, asked, call) \
    int name signature { \
        REAL(name, int (*) signature); \
        if (!on) return call; \
        struct step step = {.kind = kind_of, .detail = (long)(asked)}; \
        absolute(from_at, from, step.path); \
        absolute(to_at, to, step.other); \
        STEP(step, int, call); \
    }
WITH_TWO_NAMES(RENAME, rename, (const char *from, const char *to), AT_FDCWD, AT_FDCWD, 0, real(from, to))
WITH_TWO_NAMES(RENAME, renameat, (int at, const char *from, int in, const char *to), at, in, 0, real(at, from, in, to))
WITH_TWO_NAMES(RENAME, renameat2, (int at, const char *from, int in, const char *to, unsigned how), at, in, how, real(at, from, in, to, how))
WITH_TWO_NAMES(LINK, link, (const char *from, const char *to), AT_FDCWD, AT_FDCWD, 0, real(from, to))
WITH_TWO_NAMES(LINK, linkat, (int at, const char *from, int in, const char *to, int how), at, in, 0, real(at, from, in, to, how))

/* --- the same by number: each goes to its name above --- */

long syscall(long number, ...) {
    va_list more;
    va_start(more, number);
    long a = va_arg(more, long), b = va_arg(more, long), c = va_arg(more, long);
    long d = va_arg(more, long), e = va_arg(more, long), f = va_arg(more, long);
    va_end(more);
    if (on) switch (number) {
        case SYS_write: return write((int)a, (void *)b, (size_t)c);
        case SYS_pwrite64: return pwrite64((int)a, (void *)b, (size_t)c, d);
        case SYS_writev: return writev((int)a, (void *)b, (int)c);
        case SYS_copy_file_range: return copy_file_range((int)a, (void *)b, (int)c, (void *)d, (size_t)e, (unsigned)f);
        case SYS_sendfile: return sendfile64((int)a, (int)b, (void *)c, (size_t)d);
        case SYS_fsync: return fsync((int)a);
        case SYS_fdatasync: return fdatasync((int)a);
        case SYS_ftruncate: return ftruncate64((int)a, b);
        case SYS_fallocate: return fallocate64((int)a, (int)b, c, d);
        case SYS_openat: return openat((int)a, (char *)b, (int)c, (mode_t)d);
        case SYS_renameat2: return renameat2((int)a, (char *)b, (int)c, (char *)d, (unsigned)e);
        case SYS_unlinkat: return unlinkat((int)a, (char *)b, (int)c);
        case SYS_mkdirat: return mkdirat((int)a, (char *)b, (mode_t)c);
        case SYS_linkat: return linkat((int)a, (char *)b, (int)c, (char *)d, (int)e);
        default: break;
    }
    return plain_syscall(number, a, b, c, d, e, f);
}
