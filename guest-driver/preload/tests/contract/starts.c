// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// Starts a program by one of libc's functions, and waits for it. `starts WAY DIRECTORY NAME`.
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static int waited(pid_t child) {
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child) return 4;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 5;
}

int main(int argc, char **argv) {
    if (argc != 4) return 3;
    const char *way = argv[1], *name = argv[3];
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", argv[2], name);
    setenv("PATH", argv[2], 1);
    char *words[] = { path, NULL };
    pid_t child = -1;
    if (strcmp(way, "execve") == 0) execve(path, words, environ);
    if (strcmp(way, "execv") == 0) execv(path, words);
    if (strcmp(way, "execvp") == 0) execvp(name, words);
    if (strcmp(way, "execvpe") == 0) execvpe(name, words, environ);
    if (strcmp(way, "execl") == 0) execl(path, path, (char *)NULL);
    if (strcmp(way, "execlp") == 0) execlp(name, name, (char *)NULL);
    if (strcmp(way, "execle") == 0) execle(path, path, (char *)NULL, environ);
    if (strcmp(way, "fexecve") == 0) fexecve(open(path, O_RDONLY | O_CLOEXEC), words, environ);
    if (strcmp(way, "execveat") == 0) execveat(AT_FDCWD, path, words, environ, 0);
    if (strcmp(way, "syscall") == 0) syscall(SYS_execve, path, words, environ);
    if (strcmp(way, "spawn") == 0) {
        posix_spawn(&child, path, NULL, NULL, words, environ);
        return waited(child);
    }
    if (strcmp(way, "spawnp") == 0) {
        posix_spawnp(&child, name, NULL, NULL, words, environ);
        return waited(child);
    }
    if (strcmp(way, "vfork") == 0) {
        // Twice, as a shell does.
        for (int i = 0; i < 2; i++) {
            child = vfork();
            if (child == 0) {
                execve(path, words, environ);
                _exit(6);
            }
            if (waited(child) != 0) return 7;
        }
        return 0;
    }
    return 8;
}
