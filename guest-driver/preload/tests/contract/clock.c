// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// An echo server, and a client whose calls have time limits. `clock MODE PORT`.
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(is) do { if (!(is)) { perror(#is); exit(3); } } while (0)

int main(int argc, char **argv) {
    CHECK(argc == 3);
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(atoi(argv[2])) };
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    char word[5];
    if (strcmp(argv[1], "server") == 0) {
        CHECK(bind(fd, (void *)&at, sizeof at) == 0 && listen(fd, 16) == 0);
        int one = accept(fd, NULL, NULL);
        CHECK(one >= 0);
        for (ssize_t n; (n = recv(one, word, 5, MSG_WAITALL)) != 0;) {
            CHECK(n == 5);
            CHECK(send(one, word, 5, 0) == 5);
        }
        puts("end");
        return 0;
    }
    CHECK(connect(fd, (void *)&at, sizeof at) == 0);
    for (int turn = 0; turn < 5; turn++) {
        CHECK(send(fd, "hello", 5, 0) == 5);
        CHECK(recv(fd, word, 5, MSG_WAITALL) == 5 && memcmp(word, "hello", 5) == 0);
        struct pollfd one = { .fd = fd, .events = POLLIN };
        CHECK(poll(&one, 1, 100) == 0);
        int set = epoll_create1(0);
        struct epoll_event event = { .events = EPOLLIN };
        CHECK(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
        CHECK(epoll_wait(set, &event, 1, 100) == 0);
        close(set);
        fd_set fds;
        FD_ZERO(&fds);
        FD_SET(fd, &fds);
        struct timeval limit = { .tv_usec = 100000 };
        CHECK(select(fd + 1, &fds, NULL, NULL, &limit) == 0);
        limit = (struct timeval){ .tv_usec = 100000 };
        CHECK(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
        CHECK(recv(fd, word, 5, 0) == -1 && errno == EAGAIN);
        limit = (struct timeval){ 0 };
        CHECK(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
    }
    puts("in time");
    return 0;
}
