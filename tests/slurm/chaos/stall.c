/* Library for LD_PRELOAD that simulates a stalled shared file system. System calls on paths that contain $STALL_PATH
   wait while the file $STALL_FILE exists, but at most for a minute. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void stall(const char *path) {
    const char *part = getenv("STALL_PATH"), *file = getenv("STALL_FILE");
    struct timespec tenth = {0, 100000000};
    if (!part || !file || !path || !strstr(path, part)) return;
    for (int waited = 0; waited < 600 && access(file, F_OK) == 0; waited++) nanosleep(&tenth, 0);
}

static mode_t read_mode(int flags, va_list more) {
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;
}

DIR *opendir(const char *path) { stall(path); return REAL(opendir)(path); }
int rename(const char *path, const char *new) { stall(path); return REAL(rename)(path, new); }
int link(const char *path, const char *new) { stall(path); return REAL(link)(path, new); }
int unlink(const char *path) { stall(path); return REAL(unlink)(path); }
int mkdir(const char *path, mode_t mode) { stall(path); return REAL(mkdir)(path, mode); }
int stat(const char *path, struct stat *found) { stall(path); return REAL(stat)(path, found); }
int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = read_mode(flags, more);
    va_end(more);
    stall(path);
    return REAL(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = read_mode(flags, more);
    va_end(more);
    stall(path);
    return REAL(open64)(path, flags, mode);
}
