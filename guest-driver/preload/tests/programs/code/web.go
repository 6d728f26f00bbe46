// A web server, and a client that asks it again and again over a few connections.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

func main() {
	body := strings.Repeat("x", 612)
	if os.Args[1] == "serve" {
		http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, body) })
		panic(http.ListenAndServe(os.Args[2], nil))
	}
	seconds := 1.0
	fmt.Sscan(os.Args[3], &seconds)
	end := time.Now().Add(time.Duration(seconds * 1e9))
	http.DefaultTransport.(*http.Transport).MaxIdleConnsPerHost = 8
	var wait sync.WaitGroup
	counts := make([]int, 8)
	for n := range counts {
		wait.Add(1)
		go func(n int) {
			defer wait.Done()
			for time.Now().Before(end) {
				answer, err := http.Get("http://" + os.Args[2] + "/")
				if err != nil {
					panic(err)
				}
				got, err := io.ReadAll(answer.Body)
				answer.Body.Close()
				if err != nil || string(got) != body {
					panic(fmt.Sprint("wrong answer: ", err, len(got)))
				}
				counts[n]++
			}
		}(n)
	}
	wait.Wait()
	total := 0
	for _, n := range counts {
		total += n
	}
	fmt.Println("requests:", float64(total)/seconds)
}
