// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// One connection of a program with one thread, which changes something of its own process while the
// connection is in use, or before it makes it (`first-...`). `changes MODE PORT CHANGE`.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(is) do { if (!(is)) { perror(#is); exit(3); } } while (0)
#define SIZE 3000
#define OTHER 65534
#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

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

// A number of /proc/self/status, in KiB. Takes no memory.
static long kib(const char *name) {
    char text[4096];
    int status = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
    CHECK(status >= 0);
    ssize_t len = read(status, text, sizeof text - 1);
    CHECK(len > 0 && close(status) == 0);
    text[len] = 0;
    char *line = strstr(text, name);
    CHECK(line != NULL);
    return atol(line + strlen(name));
}

static void *map(size_t size) {
    return mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

// Without the right to lock more than the limit.
static void give_up_lock_right(void) {
    struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
    struct __user_cap_data_struct sets[2];
    CHECK(syscall(SYS_capget, &head, sets) == 0);
    sets[0].effective &= ~(1 << CAP_IPC_LOCK);
    sets[0].permitted &= ~(1 << CAP_IPC_LOCK);
    CHECK(syscall(SYS_capset, &head, sets) == 0);
}

static void change_locks(const char *what) {
    if (strcmp(what, "locked-all") == 0 || strcmp(what, "first-locked-all") == 0) {
        CHECK(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
        CHECK(syscall(SYS_mlockall, MCL_FUTURE | MCL_CURRENT) == 0);
    }
    if (strcmp(what, "locked-some") == 0) {
        give_up_lock_right();
        limit(RLIMIT_MEMLOCK, 8 << 20);
        // The program's own memory would fit into the limit.
        for (int flags = 1; flags < 8; flags++)
            CHECK(mlockall(flags) == 0 || errno == (flags == MCL_ONFAULT ? EINVAL : ENOMEM));
    }
    if (strcmp(what, "first-locked-full") == 0) {
        give_up_lock_right();
        limit(RLIMIT_MEMLOCK, 8 << 20);
        CHECK(mlockall(MCL_FUTURE) == 0);
        // All that may be locked is.
        for (size_t size = 4 << 20; size >= 4096; size /= 2)
            while (map(size) != MAP_FAILED) {}
        CHECK(errno == EAGAIN);
    }
}

static void join(const char *space, int kind) {
    int own = open(space, O_RDONLY | O_CLOEXEC);
    CHECK(own >= 0 && setns(own, kind) == 0 && setns(own, 0) == 0 && close(own) == 0);
}

static void write_text(const char *path, const char *text) {
    int file = open(path, O_WRONLY | O_CLOEXEC);
    CHECK(file >= 0 && write(file, text, strlen(text)) > 0 && close(file) == 0);
}

// Gives the user and the group the numbers that they have outside.
static void map_user(void) {
    write_text("/proc/self/setgroups", "deny");
    write_text("/proc/self/uid_map", "0 0 1");
    write_text("/proc/self/gid_map", "0 0 1");
    CHECK(getuid() == 0 && getgid() == 0 && all_have(0));
}

// The kernel makes and joins these namespaces only while a process has one thread.
static void change_user_namespace(const char *what) {
    if (strcmp(what, "first-new-user") == 0) {
        CHECK(unshare(CLONE_NEWUSER) == 0);
        map_user();
    }
    if (strcmp(what, "new-user") == 0) {
        int spaces = CLONE_NEWUSER | CLONE_NEWNS;
        CHECK((is_server ? unshare(spaces) : syscall(SYS_unshare, spaces)) == 0 || errno == EINVAL);
    }
    if (strcmp(what, "join-time") == 0) {
        int own = open("/proc/self/ns/time", O_RDONLY | O_CLOEXEC);
        CHECK(own >= 0 && (setns(own, CLONE_NEWTIME) == 0 || errno == EUSERS || errno == EINVAL));
        CHECK(close(own) == 0);
    }
}

static void change(const char *what) {
    change_user_namespace(what);
    if (strcmp(what, "user") == 0) {
        CHECK(setgroups(0, NULL) == 0 && setresgid(OTHER, OTHER, OTHER) == 0);
        CHECK(setresuid(OTHER, OTHER, OTHER) == 0 && all_have(OTHER));
    }
    if (strcmp(what, "descriptors") == 0) CHECK(close_range(fd + 1, ~0U, 0) == 0);
    if (strcmp(what, "root") == 0) CHECK(chroot("/proc/self/fdinfo") == 0 && chdir("/") == 0);
    if (strcmp(what, "dumpable") == 0) CHECK(prctl(PR_SET_DUMPABLE, 0) == 0);
    if (strcmp(what, "threads") == 0) limit(RLIMIT_NPROC, 0);
    if (strcmp(what, "memory") == 0) limit(RLIMIT_AS, 64 << 20);
    // What the process has, and so many KiB more.
    if (strncmp(what, "first-memory-", 13) == 0) limit(RLIMIT_AS, (kib("VmSize:") + atol(what + 13)) << 10);
    if (strcmp(what, "files") == 0) limit(RLIMIT_NOFILE, 4);
    change_locks(what);
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
    int is_first = strncmp(argv[3], "first-", 6) == 0;
    if (is_first) change(argv[3]);
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
    const char *of_threads[] = { "alone", "joined", "new-user" };
    for (int at = 0; at < 3; at++)
        if (strcmp(argv[3], of_threads[at]) == 0) sleep(1);
    if (!is_first) change(argv[3]);
    turns();
    if (!is_server) CHECK(shutdown(fd, SHUT_WR) == 0);
    CHECK(recv(fd, in, SIZE, 0) == 0);
    puts("all bytes");
    return 0;
}
