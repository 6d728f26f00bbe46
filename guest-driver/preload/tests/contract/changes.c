// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// One connection of a program with one thread, which changes something of its own process while the
// connection is in use. `changes MODE PORT CHANGE`.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(is) do { if (!(is)) { perror(#is); exit(3); } } while (0)
#define SIZE 3000
#define OTHER 65534

static int fd, is_server;
static char out[SIZE], in[SIZE];

static void turns(void) {
    for (int turn = 0; turn < 50; turn++) {
        if (!is_server) {
            memset(out, turn, SIZE);
            CHECK(send(fd, out, SIZE, 0) == SIZE);
        }
        CHECK(recv(fd, in, SIZE, MSG_WAITALL) == SIZE);
        if (is_server) CHECK(send(fd, in, SIZE, 0) == SIZE);
        else CHECK(memcmp(in, out, SIZE) == 0);
    }
}

// All threads of the process have the user.
static int all_have(int user) {
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    int all = 1;
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        char path[300], line[300];
        snprintf(path, sizeof path, "/proc/self/task/%s/status", task->d_name);
        FILE *status = fopen(path, "r");
        for (int real, now; status != NULL && fgets(line, sizeof line, status) != NULL;)
            if (sscanf(line, "Uid: %d %d", &real, &now) == 2) all &= real == user && now == user;
        if (status != NULL) fclose(status);
    }
    closedir(tasks);
    return all;
}

static void limit(int what, rlim_t value) {
    struct rlimit new = { value, value };
    CHECK(setrlimit(what, &new) == 0);
}

static void join(const char *space, int kind) {
    int own = open(space, O_RDONLY | O_CLOEXEC);
    CHECK(own >= 0 && setns(own, kind) == 0 && setns(own, 0) == 0 && close(own) == 0);
}

static void change(const char *what) {
    if (strcmp(what, "user") == 0) {
        CHECK(setgroups(0, NULL) == 0 && setresgid(OTHER, OTHER, OTHER) == 0);
        CHECK(setresuid(OTHER, OTHER, OTHER) == 0 && all_have(OTHER));
    }
    if (strcmp(what, "descriptors") == 0) CHECK(close_range(fd + 1, ~0U, 0) == 0);
    if (strcmp(what, "root") == 0) CHECK(chroot("/proc/self/fdinfo") == 0 && chdir("/") == 0);
    if (strcmp(what, "dumpable") == 0) CHECK(prctl(PR_SET_DUMPABLE, 0) == 0);
    if (strcmp(what, "threads") == 0) limit(RLIMIT_NPROC, 0);
    if (strcmp(what, "memory") == 0) limit(RLIMIT_AS, 64 << 20);
    if (strcmp(what, "files") == 0) limit(RLIMIT_NOFILE, 4);
    if (strcmp(what, "locked") == 0) CHECK(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
    if (strcmp(what, "mounts") == 0) CHECK(unshare(CLONE_NEWNS) == 0);
    if (strcmp(what, "network") == 0) CHECK(unshare(CLONE_NEWNET) == 0);
    if (strcmp(what, "processes") == 0) CHECK(unshare(CLONE_NEWPID) == 0);
    if (strcmp(what, "joined") == 0) join("/proc/self/ns/mnt", CLONE_NEWNS);
    if (strcmp(what, "alone") == 0) {
        CHECK(unshare(CLONE_SIGHAND) == 0 && unshare(CLONE_THREAD) == 0);
        CHECK(unshare(CLONE_VM | CLONE_SIGHAND | CLONE_FILES | CLONE_FS | CLONE_SYSVSEM) == 0);
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 4);
    is_server = strcmp(argv[1], "server") == 0;
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(atoi(argv[2])) };
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0);
    if (is_server) {
        int listener = fd;
        CHECK(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, 16) == 0);
        CHECK((fd = accept(listener, NULL, NULL)) >= 0);
    } else {
        CHECK(connect(fd, (void *)&at, sizeof at) == 0);
    }
    turns();
    // Threads of the library that begin now have begun then.
    if (strcmp(argv[3], "alone") == 0 || strcmp(argv[3], "joined") == 0) sleep(1);
    change(argv[3]);
    turns();
    if (!is_server) CHECK(shutdown(fd, SHUT_WR) == 0);
    CHECK(recv(fd, in, SIZE, 0) == 0);
    puts("all bytes");
    return 0;
}
