import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicLong;

/** A web server, and a client that asks it again and again over a few connections. */
public class Web {
    static final String BODY = "x".repeat(612);

    public static void main(String[] args) throws Exception {
        if (args[0].equals("serve")) {
            var server = HttpServer.create(new InetSocketAddress(args[1], Integer.parseInt(args[2])), 64);
            server.createContext("/", exchange -> {
                exchange.sendResponseHeaders(200, BODY.length());
                try (var out = exchange.getResponseBody()) {
                    out.write(BODY.getBytes());
                }
            });
            server.setExecutor(Executors.newFixedThreadPool(4));
            server.start();
            return;
        }
        double seconds = Double.parseDouble(args[3]);
        long end = System.nanoTime() + (long) (seconds * 1e9);
        var client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        var request = HttpRequest.newBuilder(URI.create("http://" + args[1] + ":" + args[2] + "/")).build();
        var total = new AtomicLong();
        var pool = Executors.newFixedThreadPool(8);
        var failed = new AtomicLong();
        for (int n = 0; n < 8; n++) {
            pool.submit(() -> {
                try {
                    while (System.nanoTime() < end) {
                        if (!client.send(request, BodyHandlers.ofString()).body().equals(BODY)) {
                            throw new Exception("wrong answer");
                        }
                        total.incrementAndGet();
                    }
                } catch (Exception error) {
                    error.printStackTrace();
                    failed.incrementAndGet();
                }
            });
        }
        pool.shutdown();
        pool.awaitTermination(1, java.util.concurrent.TimeUnit.HOURS);
        System.out.println("requests: " + total.get() / seconds);
        System.exit(failed.get() == 0 ? 0 : 1);
    }
}
