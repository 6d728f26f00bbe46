// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A client connects while its process can have no further thread, to a server whose program accepts
// when the client says so, on an earlier connection. `threadless MODE PORT`.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(is) \
    do { if (!(is)) { dprintf(2, "%s: line %d: %s, errno %d\n", name, __LINE__, #is, errno); _exit(3); } } while (0)
#define ROUNDS 4

static const char *name;
static struct sockaddr_in at;

static void echo(int fd, int asks) {
    char byte = 'a';
    if (asks) CHECK(write(fd, &byte, 1) == 1);
    CHECK(read(fd, &byte, 1) == 1 && byte == 'a');
    if (!asks) CHECK(write(fd, &byte, 1) == 1);
}

// Whether the process has the thread that waits for handshakes. It ends soon when there are none.
static int waits(void) {
    DIR *threads = opendir("/proc/self/task");
    int found = 0;
    for (struct dirent *one; threads && (one = readdir(threads));) {
        char path[300], text[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", one->d_name);
        int fd = open(path, O_RDONLY);
        if (fd >= 0 && read(fd, text, sizeof text - 1) > 0) found |= strncmp(text, "smc-handshake", 13) == 0;
        if (fd >= 0) close(fd);
    }
    closedir(threads);
    return found;
}

static void serve(void) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    CHECK(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
    CHECK(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, 16) == 0);
    int first = accept(listener, NULL, NULL);
    CHECK(first >= 0);
    echo(first, 0);
    for (int round = 0; round < ROUNDS; round++) {
        echo(first, 0);
        int fd = accept(listener, NULL, NULL);
        CHECK(fd >= 0);
        echo(fd, 0);
        CHECK(close(fd) == 0);
    }
}

static void visit(void) {
    int first = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(first, (void *)&at, sizeof at) == 0);
    echo(first, 1);
    while (waits()) usleep(10000);
    // The limit is not for root.
    if (geteuid() == 0) CHECK(setresuid(54321, 54321, 54321) == 0);
    struct rlimit none = { 1, 1 };
    CHECK(setrlimit(RLIMIT_NPROC, &none) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        int later = round % 2, fd = socket(AF_INET, SOCK_STREAM | (later ? SOCK_NONBLOCK : 0), 0);
        int done = connect(fd, (void *)&at, sizeof at);
        CHECK(done == 0 || (later && errno == EINPROGRESS));
        struct pollfd room = { .fd = fd, .events = POLLOUT };
        CHECK(poll(&room, 1, -1) == 1 && fcntl(fd, F_SETFL, 0) == 0);
        // Only now the server accepts.
        echo(first, 1);
        echo(fd, 1);
        CHECK(close(fd) == 0);
    }
}

int main(int argc, char **argv) {
    name = argc > 1 ? argv[1] : "nobody";
    CHECK(argc == 3);
    at = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(atoi(argv[2])) };
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (strcmp(name, "server") == 0) serve();
    else visit();
    puts("all bytes");
    return 0;
}
