// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// Connections of some threads, while another one starts programs all the time.
// `spawns_beside MODE PORT CONNECTIONS`.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHECK(is) \
    do { if (!(is)) { dprintf(2, "%s: line %d: %s, errno %d\n", name, __LINE__, #is, errno); _exit(3); } } while (0)
#define THREADS 3
#define TURNS 6
#define SIZE 3000

static const char *name;
static int port, listener = -1, connections;
static atomic_int done;

static void set_nonblocking(int fd, int on) {
    int flags = fcntl(fd, F_GETFL);
    CHECK(fcntl(fd, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK) == 0);
}

static void is_nonblocking(int fd, int on) {
    int flags = fcntl(fd, F_GETFL);
    CHECK(flags >= 0 && !(flags & O_NONBLOCK) == !on);
}

// Waits in another way each time, and then reads without MSG_DONTWAIT.
static void get(int fd, int set, char *room, int turn) {
    for (int got = 0; got < SIZE;) {
        struct pollfd one = { .fd = fd, .events = POLLIN };
        struct epoll_event event;
        int found = 1;
        do {
            if (turn % 3 == 0) found = poll(&one, 1, -1);
            if (turn % 3 == 1) found = epoll_wait(set, &event, 1, -1);
        } while (found < 0 && errno == EINTR);
        CHECK(found == 1);
        ssize_t n = recv(fd, room + got, SIZE - got, 0);
        CHECK(n > 0);
        got += n;
    }
}

static void go_to(int fd, struct sockaddr_in *to) {
    int error = 0;
    socklen_t length = sizeof error;
    set_nonblocking(fd, 1);
    CHECK(connect(fd, (void *)to, sizeof *to) == 0 || errno == EINPROGRESS);
    struct pollfd one = { .fd = fd, .events = POLLOUT };
    int found;
    do found = poll(&one, 1, -1); while (found < 0 && errno == EINTR);
    CHECK(found == 1 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0);
    set_nonblocking(fd, 0);
    is_nonblocking(fd, 0);
}

static void *work(void *unused) {
    (void)unused;
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    char out[SIZE], in[SIZE];
    for (int round = 0; round < connections; round++) {
        int fd;
        if (listener >= 0) {
            fd = accept(listener, NULL, NULL);
        } else {
            fd = socket(AF_INET, SOCK_STREAM, 0);
            go_to(fd, &to);
        }
        int set = epoll_create1(0);
        struct epoll_event event = { .events = EPOLLIN };
        CHECK(fd >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
        for (int turn = 0; turn < TURNS; turn++) {
            if (listener < 0) {
                memset(out, turn + round, SIZE);
                CHECK(send(fd, out, SIZE, 0) == SIZE);
            }
            get(fd, set, in, turn);
            // What is set stays set, whatever becomes of the number meanwhile.
            set_nonblocking(fd, 1);
            is_nonblocking(fd, 1);
            set_nonblocking(fd, 0);
            is_nonblocking(fd, 0);
            if (listener >= 0) CHECK(send(fd, in, SIZE, 0) == SIZE);
            else CHECK(memcmp(in, out, SIZE) == 0);
        }
        if (listener < 0) CHECK(shutdown(fd, SHUT_WR) == 0);
        CHECK(read(fd, in, SIZE) == 0);
        CHECK(close(fd) == 0 && close(set) == 0);
        // The number is another file now, and stays that.
        struct stat file;
        int other = open("/dev/null", O_RDONLY);
        usleep(200);
        CHECK(other >= 0 && fstat(other, &file) == 0 && S_ISCHR(file.st_mode) && close(other) == 0);
    }
    return NULL;
}

static void *spawn(void *unused) {
    (void)unused;
    while (!done) CHECK(system("true") == 0);
    return NULL;
}

int main(int argc, char **argv) {
    name = argc > 1 ? argv[1] : "nobody";
    CHECK(argc == 4);
    port = atoi(argv[2]);
    connections = atoi(argv[3]);
    if (strcmp(argv[1], "server") == 0) {
        struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(port) };
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        listener = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, 16) == 0);
    }
    pthread_t threads[THREADS], spawner;
    CHECK(pthread_create(&spawner, NULL, spawn, NULL) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, NULL) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    done = 1;
    CHECK(pthread_join(spawner, NULL) == 0);
    puts("all bytes");
    return 0;
}
